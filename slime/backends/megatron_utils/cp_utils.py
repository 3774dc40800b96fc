"""Where the tokens of a packed sample live on a context-parallel rank, and sums over samples that are split that way.

Zigzag layout: a sample of n tokens is cut into 2c chunks of ceil(n / 2c); rank r of c holds chunks r and 2c-1-r. The
logit at position t scores token t+1. "Canonical" per-token values: a rank's response tokens, chunk r's, then 2c-1-r's.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Range = tuple[int, int]


@dataclass(frozen=True)
class ParallelState:
    """The process groups the losses need. None for a group means: this process alone."""

    tp_rank: int = 0
    tp_size: int = 1
    tp_group: Any = None
    cp_rank: int = 0
    cp_size: int = 1
    cp_group: Any = None
    dp_cp_size: int = 1
    dp_cp_group: Any = None
    is_last_stage: bool = True


def get_parallel_state() -> ParallelState:
    """Megatron's groups, or a single process as long as Megatron has not set up any."""
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is None or not mpu.is_initialized():
        return ParallelState()
    return ParallelState(
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        tp_group=mpu.get_tensor_model_parallel_group(),
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
        cp_group=mpu.get_context_parallel_group(),
        dp_cp_size=mpu.get_data_parallel_world_size(with_context_parallel=True),
        dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        is_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=True),
    )


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int, parallel: ParallelState | None = None
) -> tuple[int, tuple[Range, Range], tuple[Range, Range], tuple[Range, Range]]:
    """(chunk size, this rank's two chunks, the response logits in each, the response tokens these score).

    Ranges are half-open and count from the start of the sample; without overlap with the response they are (0, 0).
    Chunks may reach beyond total_length into padding.
    """
    if not 0 <= response_length < total_length:
        raise ValueError(
            f"response of {response_length} tokens in a sample of {total_length}: a prompt must precede it"
        )
    parallel = parallel or get_parallel_state()
    pieces = 2 * parallel.cp_size
    chunk = -(-total_length // pieces)
    first_logit, end_logit = total_length - response_length - 1, total_length - 1
    chunks, logits, tokens = [], [], []
    for piece in (parallel.cp_rank, pieces - 1 - parallel.cp_rank):
        start, stop = piece * chunk, (piece + 1) * chunk
        chunks.append((start, stop))
        start, stop = max(start, first_logit), min(stop, end_logit)
        empty = start >= stop
        logits.append((0, 0) if empty else (start, stop))
        tokens.append((0, 0) if empty else (start + 1, stop + 1))
    return chunk, tuple(chunks), tuple(logits), tuple(tokens)


def slice_with_cp(
    tokens: Tensor, pad_value: float | Callable[[Tensor, int], Tensor], parallel: ParallelState | None = None
) -> Tensor:
    """This rank's two chunks of `tokens` [n, ...] -> [2 ceil(n / 2c), ...]; without context parallelism `tokens`.

    pad_value fills dimension 0 up to 2c chunks: a number, or a function (tensor, missing rows) -> padded tensor.
    """
    parallel = parallel or get_parallel_state()
    if parallel.cp_size == 1:
        return tokens
    total = tokens.size(0)
    chunk, ((a, b), (c, d)), _, _ = get_logits_and_tokens_offset_with_cp(total, 0, parallel)
    missing = 2 * parallel.cp_size * chunk - total
    if callable(pad_value):
        tokens = pad_value(tokens, missing)
    elif missing:
        tokens = torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), pad_value)])
    return torch.cat([tokens[a:b], tokens[c:d]])


def slice_log_prob_with_cp[Values: (Tensor, list)](
    values: Values, total_length: int, response_length: int, parallel: ParallelState | None = None
) -> Values:
    """The canonical slice of one value per response token (a list or a tensor [response_length])."""
    if len(values) != response_length:
        raise ValueError(f"{len(values)} per-token values for a response of {response_length} tokens")
    parallel = parallel or get_parallel_state()
    if parallel.cp_size == 1:
        return values
    (a, b), (c, d) = _response_ranges(total_length, response_length, parallel)
    if isinstance(values, list):
        return values[a:b] + values[c:d]
    return torch.cat([values[a:b], values[c:d]])


def all_gather_with_cp(
    values: Tensor, total_length: int, response_length: int, parallel: ParallelState | None = None
) -> Tensor:
    """Canonical slice -> all response tokens, [response_length], on every rank. Differentiable.

    Collective over the context-parallel group, also for ranks whose slice is empty.
    """
    parallel = parallel or get_parallel_state()
    if parallel.cp_size == 1:
        return values
    (a, b), (c, d) = _response_ranges(total_length, response_length, parallel)
    if len(values) != b - a + d - c:
        raise ValueError(f"{len(values)} values for a canonical slice of {b - a + d - c} tokens")
    first, second = values.split([b - a, d - c])
    pad = torch.nn.functional.pad
    return all_reduce_sum(
        pad(first, (a, response_length - b)) + pad(second, (c, response_length - d)), parallel.cp_group
    )


def canonical_length(total_length: int, response_length: int, parallel: ParallelState | None = None) -> int:
    """Response tokens of one sample on this rank."""
    (a, b), (c, d) = _response_ranges(total_length, response_length, parallel or get_parallel_state())
    return b - a + d - c


def local_masks(
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    parallel: ParallelState | None = None,
) -> list[Tensor]:
    """The canonical slice of every sample's loss mask."""
    parallel = parallel or get_parallel_state()
    return [
        slice_log_prob_with_cp(mask, n, m, parallel)
        for mask, n, m in zip(loss_masks, total_lengths, response_lengths, strict=True)
    ]


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    denominators: Sequence[Tensor] | Tensor | None = None,
    calculate_per_token_loss: bool = False,
    parallel: ParallelState | None = None,
) -> Callable[[Tensor], Tensor]:
    """A function that reduces concatenated canonical values, [local response tokens], to this rank's scalar share.

    Per-rollout mean (default): sum_i sum_t mask_it x_it / max(D_i, 1), D_i = denominators[i] (the mask total of the
    whole rollout sample i belongs to) or sample i's own mask total. Per token: sum_i sum_t mask_it x_it. Shares of
    the context-parallel ranks add up to the full value.
    """
    masks = local_masks(loss_masks, total_lengths, response_lengths, parallel)
    weight = torch.cat(masks).float()
    if not calculate_per_token_loss:
        if denominators is None:
            denominators = [mask.sum() for mask in loss_masks]
        if not isinstance(denominators, Tensor):
            denominators = torch.stack([torch.as_tensor(d) for d in denominators])
        local_lengths = torch.tensor([len(mask) for mask in masks])
        weight /= denominators.to(weight).clamp(min=1).repeat_interleave(local_lengths.to(weight.device))

    def sum_of_sample_mean(values: Tensor) -> Tensor:
        if values.shape != weight.shape:
            raise ValueError(f"got values {list(values.shape)} for {len(weight)} local response tokens")
        return (values * weight).sum()

    return sum_of_sample_mean


def all_reduce_sum(values: Tensor, group: Any) -> Tensor:
    """Sum over `group`; the gradient is summed over the group as well. Identity when group is None."""
    return values if group is None else _AllReduceSum.apply(values, group)


class _AllReduceSum(torch.autograd.Function):
    """y = sum_r x_r on every rank. The total loss is the sum of the ranks' losses, so dL/dx_r = sum_s dL_s/dy."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _response_ranges(total_length: int, response_length: int, parallel: ParallelState) -> tuple[Range, Range]:
    """This rank's two token ranges counted from the first response token; empty ones are (0, 0)."""
    prompt = total_length - response_length
    _, _, _, tokens = get_logits_and_tokens_offset_with_cp(total_length, response_length, parallel)
    return tuple((start - prompt, stop - prompt) if stop else (0, 0) for start, stop in tokens)
