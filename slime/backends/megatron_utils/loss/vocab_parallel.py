"""Log-probabilities and entropies over a vocabulary split by tensor parallelism, without ever holding whole logits.

Rows are taken in chunks: forward keeps a few numbers a row, backward makes the logits of each chunk again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import ParallelState, get_parallel_state
from slime.backends.megatron_utils.loss import softmax
from slime.utils.log_prob_chunks import row_chunks, rows_per_chunk


@dataclass(frozen=True)
class KeptVocabulary:
    """The columns of this rank's vocabulary shard that the softmax of each of R rows covers, besides its target's.

    rows, columns: int64 [K], rows ascending. whole: bool [R], rows that cover everything.
    """

    rows: Tensor
    columns: Tensor
    whole: Tensor

    def mask(self, part: slice, targets: Tensor, width: int) -> Tensor:
        """[rows of part, width] bool. targets: int64 [rows of part], -1 where another rank holds the column."""
        mask = self.whole[part].unsqueeze(1).repeat(1, width)
        ends = torch.tensor([part.start, part.stop], device=self.rows.device)
        first, last = torch.searchsorted(self.rows, ends).tolist()
        mask[self.rows[first:last] - part.start, self.columns[first:last]] = True
        mask[torch.arange(len(targets), device=mask.device), targets.clamp(min=0)] |= targets >= 0
        return mask


def vocab_parallel_log_probs(
    stream: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    parallel: ParallelState | None = None,
    chunk_size: int = -1,
    keep: KeptVocabulary | None = None,
    gradient_placeholder: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of targets[i] and entropy under softmax(logits[rows[i]] / temperature), both [R] (or None).

    stream: the logits [T, V / tp], or with `weight` [V / tp, H] hidden states [T, H], the same on all tensor-parallel
    ranks: then logits = stream @ weight^T, a chunk of rows at a time, in their dtype. rows: [R] int64, distinct.
    targets: [R] int64, global vocabulary ids. Columns from vocab_size on are padding. keep restricts the softmax of
    the log-probability; entropy always covers the whole vocabulary. Results are float32 (float64 from float64).

    With m the row maximum and Z = sum exp(x - m): log p = x_target - m - log Z, H = log Z - sum p (x - m). Two
    collectives a call (three with `keep`). Memory: chunks of [chunk_size, V / tp] (-1: as many rows as 1 GiB holds).
    The gradient of hidden states is this rank's part of a sum over the tensor-parallel ranks. The gradient of a weight
    with a float32 `main_grad` is added there, a chunk at a time, and what autograd sees is nothing, or zeros with
    gradient_placeholder, for hooks that need to see a gradient.
    """
    settings = _Settings(
        parallel=parallel or get_parallel_state(),
        temperature=temperature,
        vocab_size=vocab_size,
        with_entropy=with_entropy,
        chunk_size=chunk_size,
        keep=keep,
        placeholder=gradient_placeholder,
    )
    log_probs, entropy = _VocabParallelLogProbs.apply(stream, weight, rows, targets, settings)
    return log_probs, entropy if with_entropy else None


@dataclass(frozen=True)
class _Settings:
    parallel: ParallelState
    temperature: float
    vocab_size: int | None
    with_entropy: bool
    chunk_size: int
    keep: KeptVocabulary | None
    placeholder: bool

    def valid(self, width: int) -> int:
        """Columns of this rank's shard that are no padding."""
        if self.vocab_size is None:
            return width
        return min(max(self.vocab_size - self.parallel.tp_rank * width, 0), width)

    def chunks(self, count: int, width: int, stream: Tensor) -> Iterator[slice]:
        """Slices over `count` rows of `width` logits of the dtype of `stream`."""
        most = rows_per_chunk(self.chunk_size, width, stream.element_size(), stream.device.type)
        return row_chunks(count, most)


class _VocabParallelLogProbs(torch.autograd.Function):
    """Forward: statistics of each row. Backward, without communication, from logits made again: d log p / dx =
    onehot - p, dH / dx = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, weight: Tensor | None, rows: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        width = stream.size(1) if weight is None else weight.size(0)
        columns = targets - settings.parallel.tp_rank * width
        columns = torch.where((columns >= 0) & (columns < width), columns, -1)
        keep, count = settings.keep, len(rows)
        shared = {"valid": settings.valid(width), "scale": 1 / settings.temperature}
        dtype = torch.promote_types(stream.dtype, torch.float32)
        plain = stream.new_zeros((softmax.STATISTICS, count), dtype=dtype)
        restricted = plain if keep is None else torch.zeros_like(plain)
        for part in settings.chunks(count, width, stream):
            logits, _ = _logits(stream, weight, rows[part])
            if keep is not None:
                mask = keep.mask(part, columns[part], width)
                out = restricted[:, part]
                softmax.row_statistics(logits, columns[part], mask, out, with_entropy=False, **shared)
                del mask
            if keep is None or settings.with_entropy:
                out = plain[:, part]
                softmax.row_statistics(logits, columns[part], None, out, with_entropy=settings.with_entropy, **shared)
            del logits  # before the next chunk's come

        log_z = _combine(restricted, settings.parallel)
        log_probs = restricted[softmax.TARGET] - restricted[softmax.PEAK] - log_z
        entropy_log_z, entropy = log_z, log_probs.new_empty(0)
        if settings.with_entropy:
            entropy_log_z = log_z if keep is None else _combine(plain, settings.parallel)
            entropy = entropy_log_z - plain[softmax.INNER] / plain[softmax.TOTAL]
        peaks = restricted[softmax.PEAK], plain[softmax.PEAK]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(stream, weight, rows, columns, peaks[0], log_z, peaks[1], entropy_log_z, entropy)
        ctx.settings = settings
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        stream, weight, rows, columns, peak, log_z, entropy_peak, entropy_log_z, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        width = stream.size(1) if weight is None else weight.size(0)
        numbers = peak.new_zeros((softmax.GRADIENT_ROWS, len(rows)))
        numbers[softmax.LOG_P_PEAK], numbers[softmax.LOG_P_LOG_Z] = peak, log_z
        if grad_log_probs is not None:
            numbers[softmax.LOG_P_GRAD] = grad_log_probs
        if grad_entropy is not None:
            numbers[softmax.H_PEAK], numbers[softmax.H_LOG_Z] = entropy_peak, entropy_log_z
            numbers[softmax.H_VALUE], numbers[softmax.H_GRAD] = entropy, grad_entropy

        grad_stream = torch.zeros_like(stream) if ctx.needs_input_grad[0] else None
        weight_gradient = _WeightGradient(weight, settings.placeholder) if ctx.needs_input_grad[1] else None
        for part in settings.chunks(len(rows), width, stream):
            logits, inputs = _logits(stream, weight, rows[part])
            softmax.gradient_(
                logits,
                columns[part],
                settings.keep.mask(part, columns[part], width) if settings.keep else None,
                numbers[:, part],
                valid=settings.valid(width),
                scale=1 / settings.temperature,
                with_log_probs=grad_log_probs is not None,
                with_entropy=grad_entropy is not None,
            )
            if grad_stream is not None:
                grad_stream.index_copy_(0, rows[part], logits if weight is None else logits @ weight)
            if weight_gradient is not None:
                weight_gradient.add(logits, inputs)
            del logits
        return grad_stream, weight_gradient and weight_gradient.seen_by_autograd(), None, None, None


class _WeightGradient:
    """Sum over chunks of gradient^T @ inputs, in the weight's own float32 main_grad or, without, in a new tensor."""

    def __init__(self, weight: Tensor, placeholder: bool) -> None:
        self._weight, self._placeholder = weight, placeholder
        main_grad = getattr(weight, "main_grad", None)
        self._in_place = main_grad is not None and main_grad.dtype == torch.float32
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._total = main_grad if self._in_place else torch.zeros_like(weight, dtype=dtype)

    def add(self, gradient: Tensor, inputs: Tensor) -> None:
        """gradient: [c, V / tp]; inputs: [c, H], of the weight's dtype."""
        total = self._total
        if gradient.dtype == total.dtype:
            total.addmm_(gradient.t(), inputs)
        elif total.is_cuda:
            torch.addmm(total, gradient.t(), inputs, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(gradient.t().to(total.dtype), inputs.to(total.dtype))

    def seen_by_autograd(self) -> Tensor | None:
        if not self._in_place:
            return self._total.to(self._weight.dtype)
        return torch.zeros_like(self._weight) if self._placeholder else None


def _logits(stream: Tensor, weight: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [rows, V / tp] in memory of their own, the rows of `stream` they come from)."""
    inputs = stream.index_select(0, rows)
    return (inputs, inputs) if weight is None else (inputs @ weight.t(), inputs)


def _combine(statistics: Tensor, parallel: ParallelState) -> Tensor:
    """log Z [R]; the statistics of this rank's columns become those of the whole vocabulary, in place."""
    peak, total, _, inner = statistics
    if parallel.tp_size > 1 and statistics.size(1):
        own = peak.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=parallel.tp_group)
        own -= peak
        inner += total * own
        shrink = own.exp()
        inner *= shrink
        total *= shrink
        dist.all_reduce(statistics[softmax.TOTAL :], group=parallel.tp_group)
    return total.log()
