"""The dense families: Qwen2, Qwen3, Llama."""

from slime.backends.megatron_utils.megatron_to_hf.llama import LLAMA
from slime.backends.megatron_utils.megatron_to_hf.qwen2 import QWEN2
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("qwen2", "qwen3")
class QwenBridge(BaseBridge):
    """Qwen2 (q, k and v have a bias), Qwen3 (q and k are normalised per head)."""

    family = QWEN2


@register_bridge("llama")
class LlamaBridge(BaseBridge):
    """Llama 2 and 3."""

    family = LLAMA
