"""The dense families: Qwen2, Qwen3, Llama."""

from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge

from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge


@register_bridge("qwen2")
class Qwen2(BaseBridge, Qwen2Bridge):
    """Qwen2: q, k and v have a bias."""


@register_bridge("qwen3")
class Qwen3(BaseBridge, Qwen3Bridge):
    """Qwen3: q and k are normalised per head."""


@register_bridge("llama")
class Llama(BaseBridge, LLaMABridge):
    """Llama 2 and 3."""
