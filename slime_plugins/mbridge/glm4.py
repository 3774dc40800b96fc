"""GLM-4-0414 and GLM-Z1, dense."""

from slime.backends.megatron_utils.megatron_to_hf.glm4 import GLM4
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("glm4")
class GLM4Bridge(BaseBridge):
    """Norms before and after attention and MLP."""

    family = GLM4
