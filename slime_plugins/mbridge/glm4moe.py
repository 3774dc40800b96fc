"""GLM-4.5, GLM-4.6, GLM-4.7."""

from slime.backends.megatron_utils.megatron_to_hf.glm4moe import GLM4MOE
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("glm4_moe")
class GLM4MoEBridge(BaseBridge):
    """Grouped-query attention, dense layers first, then experts; a prediction layer numbered after the last one."""

    family = GLM4MOE
