"""Log-probability of every response token and entropy of its distribution, from logits split over the vocabulary.

Only response rows are computed, in chunks, in float32; one [rows, V / tp] buffer (the softmax) is kept for backward.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import (
    ParallelState,
    get_logits_and_tokens_offset_with_cp,
    get_parallel_state,
    require_zigzag,
)

# Elements per temporary of the backward pass (64 MiB of float32); it needs no communication, so blocks cost nothing.
_BACKWARD_BLOCK = 1 << 24


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Tensor] | None = None,
    top_p_token_offsets: Sequence[Tensor] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-probabilities (natural log) of the response tokens under softmax(logits / rollout_temperature).

    logits: [1, T, V / tp], this context-parallel rank's packed stream, any float dtype; computed in float32.
    unconcat_tokens: whole samples, int64 [total_length]. Returns an empty tensor, {"log_probs": [...]}; with_entropy
    adds {"entropy": [...]}: per sample [canonical length]. Entropy has a gradient iff args.entropy_coef != 0.

    With args.rollout_top_p != 1 the log-softmax of response token r runs over the vocabulary its engine kept,
    ids[offsets[r]:offsets[r + 1]] and the token itself; a sample whose record is None is not restricted. Entropy
    always covers the whole vocabulary. non_loss_data is what Megatron's schedule passes to forward-only callbacks.
    """
    parallel = get_parallel_state()
    require_zigzag(args, parallel)
    logits = logits.squeeze(0)
    rows, counts, tokens = response_rows(total_lengths, response_lengths, parallel, logits)
    targets = torch.cat(
        [sample[a:b] for sample, ranges in zip(unconcat_tokens, tokens, strict=True) for a, b in ranges]
    )
    options = {
        "temperature": args.rollout_temperature,
        "chunk_size": args.log_probs_chunk_size,
        "parallel": parallel,
    }
    if args.rollout_top_p == 1.0:
        log_probs, entropy = vocab_parallel_log_probs(logits, rows, targets, with_entropy=with_entropy, **options)
    else:
        records = _top_p_records(top_p_token_ids, top_p_token_offsets, total_lengths, response_lengths)
        keep = _kept_vocabulary(records, tokens, targets, logits.size(-1), parallel)
        log_probs, _ = vocab_parallel_log_probs(logits, rows, targets, with_entropy=False, keep=keep, **options)
        if with_entropy:
            _, entropy = vocab_parallel_log_probs(logits, rows, targets, with_entropy=True, **options)

    result = {"log_probs": list(log_probs.split(counts))}
    if with_entropy:
        result["entropy"] = list((entropy if args.entropy_coef else entropy.detach()).split(counts))
    return logits.new_empty(0), result


def get_values(
    values: Tensor,
    *,
    args: Namespace,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    non_loss_data: bool = True,
    **_: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """A critic's output [1, T, 1] where it scores response tokens: {"values": [...]}, float32 [canonical length]."""
    parallel = get_parallel_state()
    require_zigzag(args, parallel)
    values = values.squeeze(0).squeeze(-1)
    rows, counts, _ = response_rows(total_lengths, response_lengths, parallel, values)
    return values.new_empty(0), {"values": list(values.index_select(0, rows).float().split(counts))}


def response_rows(
    total_lengths: Sequence[int], response_lengths: Sequence[int], parallel: ParallelState, stream: Tensor
) -> tuple[Tensor, list[int], list[tuple[tuple[int, int], ...]]]:
    """Where a packed stream [T, ...] scores response tokens, in canonical order, sample after sample.

    Returns row numbers (int64, on stream's device), the number of rows of each sample and the ranges of the scored
    tokens in each whole sample. Raises ValueError when the stream is too short.
    """
    offset, pieces, counts, token_ranges = 0, [], [], []
    for n, m in zip(total_lengths, response_lengths, strict=True):
        chunk, chunks, logits, tokens = get_logits_and_tokens_offset_with_cp(n, m, parallel)
        for piece, ((start, _), (a, b)) in enumerate(zip(chunks, logits, strict=True)):
            shift = offset + piece * chunk - start
            pieces.append(np.arange(a + shift, b + shift, dtype=np.int64))
        counts.append(sum(b - a for a, b in logits))
        token_ranges.append(tokens)
        offset += n if parallel.cp_size == 1 else 2 * chunk
    if stream.size(0) < offset:
        raise ValueError(f"the model returned {stream.size(0)} positions for {offset} packed tokens")
    return torch.from_numpy(np.concatenate(pieces)).to(stream.device), counts, token_ranges


def vocab_parallel_log_probs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    parallel: ParallelState,
    chunk_size: int = -1,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of targets[i] and entropy under softmax(logits[rows[i]] / temperature), vocabulary split by TP.

    logits: [T, V / tp]. rows: [R] int64, distinct. targets: [R] int64, global vocabulary ids. keep: [R, V / tp] bool,
    the columns the softmax covers. Returns [R] and [R] (or None). With m the row maximum and Z = sum exp(x - m):
    log p = x_target - m - log Z, H = log Z - sum p (x - m). Two collectives a chunk of at most chunk_size rows.
    """
    keep_softmax = torch.is_grad_enabled() and logits.requires_grad
    log_probs, entropy = _VocabParallelLogProbs.apply(
        logits, rows, targets, keep, temperature, chunk_size, with_entropy, keep_softmax, parallel
    )
    return log_probs, entropy if with_entropy else None


class _VocabParallelLogProbs(torch.autograd.Function):
    """d log p / dx = onehot - p and dH / dx = -p (log p + H): both from the saved softmax, without communication."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        keep: Tensor | None,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
        keep_softmax: bool,
        parallel: ParallelState,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        width = logits.size(-1)
        columns, owned = _local_columns(targets, width, parallel)
        log_probs = logits.new_empty(len(rows), dtype=dtype)
        entropy = logits.new_empty(len(rows) if with_entropy else 0, dtype=dtype)
        softmax = logits.new_empty((len(rows) if keep_softmax else 0, width), dtype=dtype)
        for part in _chunks(len(rows), chunk_size):
            x = softmax[part] if keep_softmax else logits.new_empty((len(rows[part]), width), dtype=dtype)
            if logits.dtype == dtype:
                torch.index_select(logits, 0, rows[part], out=x)
            else:
                x.copy_(logits.index_select(0, rows[part]))
            if temperature != 1.0:
                x.div_(temperature)
            if keep is not None:
                x.masked_fill_(~keep[part], float("-inf"))
            log_z, target, inner = _softmax_(x, columns[part], owned[part], with_entropy, parallel)
            log_probs[part] = target - log_z
            if with_entropy:
                entropy[part] = log_z - inner
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(softmax, rows, columns, owned, entropy)
        ctx.shape, ctx.dtype, ctx.temperature = logits.shape, logits.dtype, temperature
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        softmax, rows, columns, owned, entropy = ctx.saved_tensors
        grad = softmax.new_zeros(ctx.shape, dtype=ctx.dtype)
        for part in _chunks(len(rows), max(_BACKWARD_BLOCK // ctx.shape[-1], 1)):
            p = softmax[part]
            block = torch.zeros_like(p)
            if grad_log_probs is not None:
                g = grad_log_probs[part].unsqueeze(-1)
                torch.mul(p, -g, out=block)
                block.scatter_add_(1, columns[part].unsqueeze(-1), g * owned[part].unsqueeze(-1))
            if grad_entropy is not None:
                slope = torch.xlogy(p, p).add_(p * entropy[part].unsqueeze(-1))
                block.addcmul_(slope, grad_entropy[part].unsqueeze(-1), value=-1)
            if ctx.temperature != 1.0:
                block.div_(ctx.temperature)
            grad.index_copy_(0, rows[part], block.to(ctx.dtype))
        return grad, *[None] * 8


def _softmax_(
    x: Tensor, columns: Tensor, owned: Tensor, with_entropy: bool, parallel: ParallelState
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Turn x [R, V / tp] into its softmax over the whole vocabulary, in place.

    Returns log Z, the target's x - m and, with_entropy, sum p (x - m); each [R], complete on every TP rank.
    """
    peak = x.amax(-1, keepdim=True)
    if parallel.tp_size > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=parallel.tp_group)
    x.sub_(peak)
    target = torch.where(owned, x.gather(1, columns.unsqueeze(-1)).squeeze(-1), 0)
    if with_entropy:
        weights = x.exp()
        sums = torch.stack([weights.sum(-1), target, torch.einsum("rv,rv->r", weights, x)])
        x.copy_(weights)
    else:
        sums = torch.stack([x.exp_().sum(-1), target])
    if parallel.tp_size > 1:
        dist.all_reduce(sums, group=parallel.tp_group)
    z = sums[0]
    x.div_(z.unsqueeze(-1))
    return z.log(), sums[1], sums[2] / z if with_entropy else None


def _local_columns(targets: Tensor, width: int, parallel: ParallelState) -> tuple[Tensor, Tensor]:
    """Column of each target in this rank's vocabulary shard (0 for others') and whether the shard holds it."""
    columns = targets - parallel.tp_rank * width
    owned = (columns >= 0) & (columns < width)
    return torch.where(owned, columns, 0), owned


def _chunks(rows: int, chunk_size: int) -> Iterator[slice]:
    """ceil(rows / chunk_size) slices of nearly equal size; one when chunk_size is not positive; none without rows."""
    if rows == 0:
        return
    count = -(-rows // chunk_size) if chunk_size > 0 else 1
    size = -(-rows // count)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _top_p_records(
    ids: Sequence[Tensor] | None,
    offsets: Sequence[Tensor] | None,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> list[tuple[Tensor, Tensor] | None]:
    """Per sample (kept ids, offsets [response_length + 1]) or None."""
    if ids is None or offsets is None:
        raise ValueError(
            "--rollout-top-p below 1 needs rollout_top_p_token_ids and rollout_top_p_token_offsets of every sample: "
            "the engine must return the kept vocabulary, or use --rollout-top-p 1.0"
        )
    records = []
    for sample, (kept, bounds, length) in enumerate(zip(ids, offsets, response_lengths, strict=True)):
        if kept is not None and len(bounds) != length + 1:
            raise ValueError(f"micro-batch sample {sample}: {len(bounds)} top-p offsets for {length} tokens, not +1")
        records.append(None if kept is None else (kept, bounds, total_lengths[sample] - length))
    return records


def _kept_vocabulary(
    records: list[tuple[Tensor, Tensor, int] | None],
    token_ranges: list[tuple[tuple[int, int], ...]],
    targets: Tensor,
    width: int,
    parallel: ParallelState,
) -> Tensor:
    """[R, V / tp] bool: which columns of this rank's vocabulary shard the recorded top-p set of each row contains."""
    keep = torch.zeros(len(targets), width, dtype=torch.bool, device=targets.device)
    row, row_of_id, kept_ids = 0, [], []
    for record, ranges in zip(records, token_ranges, strict=True):
        for start, stop in ranges:
            rows = torch.arange(row, row + stop - start, device=targets.device)
            row += stop - start
            if record is None:
                keep[rows] = True
            elif stop > start:
                ids, bounds, prompt = record
                bounds = bounds[start - prompt : stop - prompt + 1].long()
                row_of_id.append(rows.repeat_interleave(bounds.diff().to(rows.device)))
                kept_ids.append(ids[bounds[0] : bounds[-1]].to(rows.device).long())
    row_of_id = torch.cat([*row_of_id, torch.arange(len(targets), device=targets.device)])
    columns, owned = _local_columns(torch.cat([*kept_ids, targets]), width, parallel)
    keep[row_of_id[owned], columns[owned]] = True
    return keep
