"""Models with sparse latent attention: DeepSeek-V3.2, GLM-5, GLM-5.2."""

from slime.backends.megatron_utils.megatron_to_hf.deepseekv3 import DEEPSEEKV3
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("deepseek_v32", "glm_moe_dsa")
class DeepseekV32Bridge(BaseBridge):
    """DeepSeek-V3 with an indexer in the layers that choose tokens; the others have none, as in the checkpoint."""

    family = DEEPSEEKV3
