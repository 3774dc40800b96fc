"""The two passes over a chunk of logits on a GPU, in Triton: row statistics, and logits turned into their gradient.

Each reads the chunk once, computes in float32 and keeps nothing of the chunk's size; `softmax` says what they compute.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def row_statistics(
    logits: Tensor, columns: Tensor, keep: Tensor | None, out: Tensor, valid: int, scale: float, with_entropy: bool
) -> None:
    """`softmax.row_statistics` for logits [R, W] of a half or single precision type on a CUDA device."""
    _statistics_kernel[(len(logits),)](
        logits,
        keep if keep is not None else columns,
        columns,
        out,
        logits.stride(0),
        keep.stride(0) if keep is not None else 0,
        out.stride(0),
        valid,
        scale,
        WITH_ENTROPY=with_entropy,
        KEEP=keep is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def gradient_(
    logits: Tensor,
    columns: Tensor,
    keep: Tensor | None,
    rows: Tensor,
    valid: int,
    scale: float,
    with_log_probs: bool,
    with_entropy: bool,
) -> None:
    """`softmax.gradient_` for logits [R, W] of a half or single precision type on a CUDA device."""
    _gradient_kernel[(len(logits), triton.cdiv(logits.size(1), _BLOCK))](
        logits,
        keep if keep is not None else columns,
        columns,
        rows,
        logits.stride(0),
        keep.stride(0) if keep is not None else 0,
        rows.stride(0),
        logits.size(1),
        valid,
        scale,
        WITH_LOG_PROBS=with_log_probs,
        WITH_ENTROPY=with_entropy,
        KEEP=keep is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _statistics_kernel(
    logits,
    keep,
    columns,
    out,
    logits_stride,
    keep_stride,
    out_stride,
    valid,
    scale,
    WITH_ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. `peak` is the running maximum; sums are per lane, and follow it when it grows."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * logits_stride
    lanes = tl.arange(0, BLOCK)
    peak = tl.full((), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    inner = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, valid, BLOCK):
        at = first + lanes
        live = at < valid
        if KEEP:
            live &= tl.load(keep + row * keep_stride + at, mask=live, other=0) != 0
        x = tl.load(start + at, mask=live, other=float("-inf")).to(tl.float32) * scale
        new_peak = tl.maximum(peak, tl.max(x, 0))
        weights = tl.exp(x - new_peak)
        shrink = tl.exp(peak - new_peak)
        if WITH_ENTROPY:
            inner = shrink * (inner + total * (peak - new_peak)) + weights * tl.where(live, x - new_peak, 0.0)
        total = shrink * total + weights
        peak = new_peak
    column = tl.load(columns + row)
    tl.store(out + row, peak)
    tl.store(out + out_stride + row, tl.sum(total, 0))
    target = tl.load(start + column, mask=column >= 0, other=0.0).to(tl.float32) * scale
    tl.store(out + 2 * out_stride + row, target)
    if WITH_ENTROPY:
        tl.store(out + 3 * out_stride + row, tl.sum(inner, 0))


@triton.jit
def _gradient_kernel(
    logits,
    keep,
    columns,
    rows,
    logits_stride,
    keep_stride,
    rows_stride,
    width,
    valid,
    scale,
    WITH_LOG_PROBS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of a row, element by element, in place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    live = at < valid
    here = logits + row * logits_stride + at
    x = tl.load(here, mask=live, other=float("-inf")).to(tl.float32) * scale
    result = tl.zeros((BLOCK,), tl.float32)
    rows += row
    if WITH_LOG_PROBS:
        p = tl.exp(x - tl.load(rows) - tl.load(rows + rows_stride))
        if KEEP:
            p = tl.where(tl.load(keep + row * keep_stride + at, mask=live, other=0) != 0, p, 0.0)
        hit = at == tl.load(columns + row)
        result += tl.load(rows + 2 * rows_stride) * (tl.where(hit, 1.0, 0.0) - p)
    if WITH_ENTROPY:
        log_p = x - tl.load(rows + 3 * rows_stride) - tl.load(rows + 4 * rows_stride)
        p = tl.exp(log_p)
        slope = tl.where(live, p * (log_p + tl.load(rows + 5 * rows_stride)), 0.0)
        result -= tl.load(rows + 6 * rows_stride) * slope
    result = tl.where(live, result * scale, 0.0)
    tl.store(here, result.to(logits.dtype.element_ty), mask=inside)
