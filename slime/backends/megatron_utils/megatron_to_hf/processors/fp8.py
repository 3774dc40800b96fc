"""FP8 (e4m3) weights with one float32 scale a block, a row or a tensor; a weight is its FP8 value times its scale.

One definition for files and for weights pushed to engines, so that both hold the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.megatron_to_hf.processors.rounding import quotient

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Below this a block counts as zero: its scale stays a normal float32, its weights become 0.
MIN_ABSMAX = 1e-12


@dataclass(frozen=True)
class BlockFp8:
    """One scale for each block of block_size[0] rows x block_size[1] columns; blocks at the edges may be smaller.

    power_of_two: scales are rounded up to powers of two (ue8m0), still stored as float32.
    """

    block_size: tuple[int, int] = (128, 128)
    power_of_two: bool = False

    parts: ClassVar[tuple[str, ...]] = ("weight", "weight_scale_inv")

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [M, N] -> weight [M, N] e4m3, weight_scale_inv [ceil(M / bm), ceil(N / bn)] float32.

        The scale multiplies the weight, whatever its name says. ValueError for a weight with inf or nan.
        """
        rows, columns = weight.shape
        bm, bn = self.block_size
        quantized = torch.empty(rows, columns, dtype=FP8, device=weight.device)
        scale = torch.empty(-(-rows // bm), -(-columns // bn), dtype=torch.float32, device=weight.device)
        if not weight.is_meta:
            step = _rows_at_once(weight, bm)
            for start in range(0, rows, step):
                piece = slice(start, start + step)
                blocks = slice(start // bm, -(-min(start + step, rows) // bm))
                quantized[piece], scale[blocks] = self._quantize_rows(weight[piece])
            _check_finite(scale)
        return {"weight": quantized, "weight_scale_inv": scale}

    def dequantize(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse: [M, N] bfloat16, the float32 product rounded once. ValueError when the scale does not fit."""
        quantized, scale = parts["weight"], parts["weight_scale_inv"]
        rows, columns = quantized.shape
        bm, bn = self.block_size
        expected = (-(-rows // bm), -(-columns // bn))
        if tuple(scale.shape) != expected:
            raise ValueError(
                f"a weight of {rows} x {columns} in blocks of {bm} x {bn} has {expected[0]} x {expected[1]} scales, "
                f"here are {list(scale.shape)}"
            )
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=quantized.device)
        for start in range(0, rows, bm):
            factors = scale[start // bm].float().repeat_interleave(bn)[:columns]
            weight[start : start + bm] = _to_float(quantized[start : start + bm]) * factors
        return weight

    def _quantize_rows(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole rows of blocks, the last of which may be short."""
        rows, columns = weight.shape
        bm, bn = self.block_size
        padded = weight.float()
        if columns % bn or rows % bm:
            padded = F.pad(padded, (0, -columns % bn, 0, -rows % bm))
        blocks = padded.view(-(-rows // bm), bm, -(-columns // bn), bn)
        scale = _scale(blocks.abs().amax((1, 3)))
        if self.power_of_two:
            scale = _next_power_of_two(scale)
        quantized = _cast(blocks / scale[:, None, :, None])
        return quantized.view(padded.shape)[:rows, :columns], scale


@dataclass(frozen=True)
class ChannelFp8:
    """One scale for each row (output channel)."""

    parts: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [M, N] -> weight [M, N] e4m3, weight_scale [M, 1] float32. ValueError for inf or nan."""
        quantized = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        scale = torch.empty(weight.shape[0], 1, dtype=torch.float32, device=weight.device)
        if not weight.is_meta:
            step = _rows_at_once(weight, 128)
            for start in range(0, weight.shape[0], step):
                rows = weight[start : start + step].float()
                scale[start : start + step] = _scale(rows.abs().amax(1, keepdim=True))
                quantized[start : start + step] = _cast(rows / scale[start : start + step])
            _check_finite(scale)
        return {"weight": quantized, "weight_scale": scale}

    def dequantize(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse: [M, N] bfloat16. ValueError when the scale is not [M, 1]."""
        quantized, scale = parts["weight"], parts["weight_scale"]
        if tuple(scale.shape) != (quantized.shape[0], 1):
            raise ValueError(f"a weight of {quantized.shape[0]} rows has as many scales, here are {list(scale.shape)}")
        return _dequantize_rows(quantized, scale.float())


@dataclass(frozen=True)
class TensorFp8:
    """One scale for the whole weight."""

    parts: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [M, N] -> weight [M, N] e4m3, weight_scale [1] float32. ValueError for inf or nan."""
        quantized = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        scale = torch.empty(1, dtype=torch.float32, device=weight.device)
        if not weight.is_meta:
            low, high = weight.aminmax()
            scale[0] = _scale(torch.maximum(-low, high).float())
            _check_finite(scale)
            step = _rows_at_once(weight, 128)
            for start in range(0, weight.shape[0], step):
                quantized[start : start + step] = _cast(weight[start : start + step].float() / scale)
        return {"weight": quantized, "weight_scale": scale}

    def dequantize(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse: [M, N] bfloat16. ValueError when there is more than one scale."""
        quantized, scale = parts["weight"], parts["weight_scale"]
        if scale.numel() != 1:
            raise ValueError(f"a weight has one scale, here are {list(scale.shape)}")
        return _dequantize_rows(quantized, scale.float().view(1, 1).expand(quantized.shape[0], 1))


def _scale(absmax: torch.Tensor) -> torch.Tensor:
    """The factor that maps absmax to the largest FP8 value. float32, finite and above 0."""
    return quotient(absmax.clamp(min=MIN_ABSMAX), FP8_MAX)


def _next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below `scale` (positive); inf and nan stay."""
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2 ** exponent, mantissa in [0.5, 1)
    power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return torch.where(torch.isfinite(scale), power, scale)


def _cast(values: torch.Tensor) -> torch.Tensor:
    """To e4m3, to the nearest, ties to even; what rounding put above 448 is 448 (the cast alone would make it nan)."""
    return values.clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _dequantize_rows(quantized: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """quantized [M, N], scale [M, 1] float32."""
    weight = torch.empty(quantized.shape, dtype=torch.bfloat16, device=quantized.device)
    step = _rows_at_once(quantized, 128)
    for start in range(0, quantized.shape[0], step):
        weight[start : start + step] = _to_float(quantized[start : start + step]) * scale[start : start + step]
    return weight


def _to_float(quantized: torch.Tensor) -> torch.Tensor:
    """e4m3 -> float32. On the CPU by a table, three times as fast as torch's cast."""
    if quantized.device.type != "cpu":
        return quantized.float()
    return torch.from_numpy(np.take(_float_values(), quantized.view(torch.uint8).numpy()))


@cache
def _float_values() -> np.ndarray:
    """The value of each of the 256 bit patterns."""
    return torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()


def _rows_at_once(weight: torch.Tensor, block: int) -> int:
    """On the CPU one row of blocks, which stays in the cache (six times faster); elsewhere the whole weight."""
    return block if weight.device.type == "cpu" else max(block, weight.shape[0])


def _check_finite(scale: torch.Tensor) -> None:
    if not torch.isfinite(scale).all():
        raise ValueError("the weight holds inf or nan")
