"""Qwen2-MoE and Qwen3-MoE."""

from slime.backends.megatron_utils.megatron_to_hf.qwen3moe import QWEN3MOE
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("qwen2_moe", "qwen3_moe")
class QwenMoEBridge(BaseBridge):
    """Experts in (almost) every layer; Qwen2's shared expert has a gate of its own."""

    family = QWEN3MOE
