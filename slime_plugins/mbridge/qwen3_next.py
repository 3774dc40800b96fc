"""Qwen3-Next."""

from slime.backends.megatron_utils.megatron_to_hf.qwen3_next import QWEN3_NEXT
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("qwen3_next")
class Qwen3NextBridge(BaseBridge):
    """Gated delta nets, gated attention in every fourth layer, experts with a gated shared one."""

    family = QWEN3_NEXT
