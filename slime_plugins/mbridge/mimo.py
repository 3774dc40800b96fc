"""MiMo: a Qwen2 with prediction layers."""

from slime.backends.megatron_utils.megatron_to_hf.mimo import MIMO
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("mimo")
class MiMoBridge(BaseBridge):
    """Its prediction layers have names of their own and read (hidden state, embedding) in that order."""

    family = MIMO
