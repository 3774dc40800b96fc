"""INT4 weights as compressed-tensors packs them: groups along the input dimension, eight values in an int32.

Round to nearest; a weight is scale * (value - zero), where the zero is 8 in the symmetric form.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.megatron_to_hf.processors.rounding import quotient

MIN_SCALE = 1e-5
VALUES_PER_WORD = 8


@dataclass(frozen=True)
class PackedInt4:
    """group_size columns of a row share one scale (and one zero point unless symmetric)."""

    group_size: int = 32
    symmetric: bool = True

    all_parts: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")

    @property
    def parts(self) -> tuple[str, ...]:
        return self.all_parts[:3] if self.symmetric else self.all_parts

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [M, N] -> weight_packed [M, ceil(N / 8)] int32, weight_scale [M, N / group] in the weight's dtype,
        weight_shape [2] int32; unless symmetric also weight_zero_point [ceil(M / 8), N / group] int32.

        The scale is rounded to its stored dtype first, so that the values are the nearest for what a reader computes.
        ValueError when N is no multiple of the group size, or for a weight with inf or nan.
        """
        rows, columns = weight.shape
        if columns % self.group_size:
            legal = [size for size in (16, 32, 64, 128, 256) if columns % size == 0]
            raise ValueError(
                f"{columns} columns are no multiple of the group size {self.group_size}; "
                f"sizes that fit: {', '.join(map(str, legal)) or 'none'}"
            )
        groups = columns // self.group_size
        words = -(-columns // VALUES_PER_WORD)
        device = weight.device
        packed = torch.empty(rows, words, dtype=torch.int32, device=device)
        scale = torch.empty(rows, groups, dtype=weight.dtype, device=device)
        zero = torch.full((rows, groups), 8, dtype=torch.int32, device=device)
        if not weight.is_meta:
            step = 128 if device.type == "cpu" else rows
            for start in range(0, rows, step):
                piece = slice(start, start + step)
                grouped = weight[piece].float().view(-1, groups, self.group_size)
                scale[piece], zero[piece], values = self._quantize_groups(grouped, weight.dtype)
                packed[piece] = pack(values.view(-1, columns))
            if not torch.isfinite(scale).all():
                raise ValueError("the weight holds inf or nan")
        result = {
            "weight_packed": packed,
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns], dtype=torch.int32).to(device),
        }
        if not self.symmetric:
            result["weight_zero_point"] = pack(zero.t()).t().contiguous()
        return result

    def dequantize(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse: [M, N] bfloat16, the float32 product rounded once. ValueError when the parts do not fit."""
        packed, scale = parts["weight_packed"], parts["weight_scale"]
        rows, columns = (int(size) for size in parts["weight_shape"])
        groups = -(-columns // self.group_size)
        expected = {"weight_packed": (rows, -(-columns // VALUES_PER_WORD)), "weight_scale": (rows, groups)}
        for name, shape in expected.items():
            if tuple(parts[name].shape) != shape:
                raise ValueError(f"{name} of a {rows} x {columns} weight is {shape}, here {tuple(parts[name].shape)}")
        zero = torch.full((rows, groups), 8, device=packed.device)
        if not self.symmetric:
            zero = unpack(parts["weight_zero_point"].t(), rows).t()
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=packed.device)
        for start in range(0, rows, 128):
            piece = slice(start, start + 128)
            values = unpack(packed[piece], columns).float()
            values -= zero[piece].float().repeat_interleave(self.group_size, dim=1)[:, :columns]
            weight[piece] = values * scale[piece].float().repeat_interleave(self.group_size, dim=1)[:, :columns]
        return weight

    def _quantize_groups(
        self, grouped: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | int, torch.Tensor]:
        """grouped [M, groups, group] float32 -> scale [M, groups], zero [M, groups], values 0..15 like grouped."""
        if self.symmetric:
            scale = quotient(grouped.abs().amax(-1), 7).clamp(min=MIN_SCALE).to(dtype)
            values = (grouped / scale.float().unsqueeze(-1)).round_().clamp_(-7, 7).add_(8)
            return scale, 8, values
        # the range must contain 0, or a group of values far from it could not be reached by any zero in 0..15
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = quotient(high - low, 15).clamp(min=MIN_SCALE).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, 15)
        values = (grouped / scale.float().unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, 15)
        return scale, zero.int(), values


def pack(values: torch.Tensor) -> torch.Tensor:
    """values [M, N] of 0..15 -> [M, ceil(N / 8)] int32; value j of a word is in bits 4j to 4j + 3, the rest is 0."""
    nibbles = F.pad(values.to(torch.uint8), (0, -values.shape[1] % VALUES_PER_WORD)).contiguous()
    pairs = nibbles.view(*nibbles.shape[:-1], -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous().view(torch.int32)


def unpack(words: torch.Tensor, columns: int) -> torch.Tensor:
    """words [M, W] int32 -> [M, columns] uint8, the inverse of pack."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)[..., :columns]
