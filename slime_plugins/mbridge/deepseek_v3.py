"""Models with dense latent attention: DeepSeek-V3 and R1, Moonlight, Kimi-K2 and K2.5, GLM-4.7-Flash."""

from slime.backends.megatron_utils.megatron_to_hf.deepseekv3 import DEEPSEEKV3, KIMI_K25
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("deepseek_v3", "kimi_k2", "glm4_moe_lite")
class DeepseekV3Bridge(BaseBridge):
    """Latent attention, experts with a routing bias."""

    family = DEEPSEEKV3


@register_bridge("kimi_k25")
class KimiK25Bridge(BaseBridge):
    """The language model of a checkpoint with a vision tower, which is passed over."""

    family = KIMI_K25
