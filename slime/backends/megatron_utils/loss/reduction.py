"""How per-token values of a micro-batch become one number, and how large a share of the step that number is."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import (
    ParallelState,
    all_reduce_sum,
    get_sum_of_sample_mean,
    local_masks,
)

Reducer = Callable[[Tensor], Tensor]


def make_reducer(
    args: Namespace, batch: dict[str, Any], loss_masks: Sequence[Tensor], parallel: ParallelState
) -> Reducer:
    """Sum of per-rollout token means over the micro-batch, or of tokens with --calculate-per-token-loss.

    Denominators are batch["rollout_mask_sums"], or the mask totals of the batch's own masks: they never depend on
    `loss_masks`, so rejecting a token lowers the weight of its rollout instead of raising its neighbours'.
    """
    denominators = batch.get("rollout_mask_sums")
    if denominators is None:
        denominators = [mask.sum() for mask in batch["loss_masks"]]
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        loss_masks,
        denominators,
        args.calculate_per_token_loss,
        parallel,
    )


def count_tokens(loss_masks: Sequence[Tensor]) -> Tensor:
    """Unmasked tokens of whole responses, int32 scalar: the same on all context-parallel ranks."""
    return torch.stack([mask.sum() for mask in loss_masks]).sum().int()


def sequence_mean(values: Tensor, batch: dict[str, Any], counts: Sequence[int], parallel: ParallelState) -> Tensor:
    """Each sample's mean over the unmasked tokens of its whole response, repeated for its local tokens.

    values: concatenated canonical [local tokens]; counts: local tokens of each sample. Differentiable; one all-reduce
    of [samples] over the context-parallel group. A fully masked sample has mean 0.
    """
    masks = batch["loss_masks"]
    local = torch.cat(local_masks(masks, batch["total_lengths"], batch["response_lengths"], parallel))
    sample = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(values.device)
    sums = values.new_zeros(len(counts)).index_add(0, sample, values * local)
    if parallel.cp_size > 1:
        sums = all_reduce_sum(sums, parallel.cp_group)
    totals = torch.stack([mask.sum() for mask in masks]).clamp(min=1)
    return (sums / totals)[sample]
