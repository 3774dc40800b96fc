"""Qwen3.5: the language model, alone or out of a checkpoint with a vision tower; experts packed or one by one."""

import re
from pathlib import Path

import torch

from slime.backends.megatron_utils.megatron_to_hf.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import register_bridge
from slime_plugins.mbridge.weights import Weights

_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


class UnpackedExperts(Weights):
    """Also finds an expert's matrices in tensors that hold all experts of a layer.

    experts.gate_up_proj: [experts, 2 * ffn, hidden], experts.down_proj: [experts, hidden, ffn].
    """

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._last: tuple[str, torch.Tensor] | None = None

    def parts(self, name: str) -> list[str]:
        packed = self._packed(name)
        return super().parts(name) if packed is None else [packed]

    def read(self, name: str) -> torch.Tensor:
        """As `Weights.read`. A layer's experts come one after the other: the tensor read last is kept for the next."""
        packed = self._packed(name)
        if packed is None:
            return super().read(name)
        if self._last is None or self._last[0] != packed:
            self._last = (packed, super().read(packed))
        match = _EXPERT.fullmatch(name)
        expert = self._last[1][int(match[2])]
        return expert if match[3] == "down" else expert.chunk(2)[match[3] == "up"]

    def _packed(self, name: str) -> str | None:
        match = _EXPERT.fullmatch(name)
        if match is None or name in self.directory:
            return None
        packed = match[1] + ("down_proj" if match[3] == "down" else "gate_up_proj")
        return packed if packed in self.directory else None


@register_bridge("qwen3_5_text", "qwen3_5_moe_text")
class Qwen35TextBridge(BaseBridge):
    """A checkpoint of the language model alone."""

    family = QWEN3_5_TEXT
    weights_class = UnpackedExperts


@register_bridge("qwen3_5", "qwen3_5_moe")
class Qwen35Bridge(Qwen35TextBridge):
    """A checkpoint with a vision tower, which is passed over."""

    family = QWEN3_5
