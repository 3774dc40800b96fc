"""MiniMax-M2."""

from slime.backends.megatron_utils.megatron_to_hf.minimax_m2 import MINIMAX_M2
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("minimax_m2")
class MiniMaxM2Bridge(BaseBridge):
    """q and k normalised over all heads together; experts in every layer."""

    family = MINIMAX_M2
