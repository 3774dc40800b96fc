"""Weights that correct for the difference between the policy that sampled (rollout engine) and the one that trains.

A correction is called with keywords and returns (per-token loss, loss masks, metrics), see `apply_correction`.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import local_masks
from slime.utils.misc import load_function

Correction = tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]


def apply_correction(
    args: Namespace, batch: dict[str, Any], pg_loss: Tensor, train_log_probs: list[Tensor]
) -> Correction:
    """Call --custom-tis-function-path, or `vanilla_tis_function`, on one micro-batch.

    pg_loss: concatenated canonical [local response tokens]; train_log_probs: per-sample canonical, without gradient.
    With get_mismatch_metrics alone the loss and the masks come back unchanged: metrics must not change training.
    """
    if batch.get("rollout_log_probs") is None:
        flag = "--use-tis" if args.use_tis else "--get-mismatch-metrics"
        raise ValueError(f"{flag} compares with the rollout engine, but the rollout data have no rollout_log_probs")
    function: Callable[..., Correction] = vanilla_tis_function
    if args.custom_tis_function_path:
        function = load_function(args.custom_tis_function_path)
    corrected, masks, metrics = function(
        args=args,
        pg_loss=pg_loss,
        train_log_probs=train_log_probs,
        rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    if not args.use_tis:
        return pg_loss, batch["loss_masks"], metrics
    return corrected, masks, metrics


def vanilla_tis_function(
    *,
    args: Namespace,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Correction:
    """Truncated importance sampling: w = clamp(r, tis_clip_low, tis_clip), r = p_train / p_rollout of each token."""
    ratio = _ratio(train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, loss_masks, _metrics(ratio, weight)


def icepop_function(
    *,
    args: Namespace,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Correction:
    """IcePop: w = r while tis_clip_low <= r <= tis_clip, else 0: tokens the engines disagree on do not train."""
    ratio = _ratio(train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)
    weight = torch.where((ratio >= args.tis_clip_low) & (ratio <= args.tis_clip), ratio, 0)
    return pg_loss * weight, loss_masks, _metrics(ratio, weight)


def _ratio(
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Tensor:
    """p_train / p_rollout of each token, without gradient.

    1 on masked tokens: what a tool wrote has no rollout log-probability, and a placeholder must not overflow.
    """
    action = torch.cat(local_masks(loss_masks, total_lengths, response_lengths)) != 0
    difference = torch.cat(list(train_log_probs)).detach().float() - torch.cat(list(rollout_log_probs)).float()
    return torch.where(action, difference, 0).exp()


def _metrics(ratio: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weight != ratio).float(), "tis_abs": (ratio - 1).abs()}
