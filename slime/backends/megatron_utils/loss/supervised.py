"""Losses against given targets: next tokens (SFT) and returns (a critic's values)."""

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.loss.log_probs import Scores, get_log_probs_and_entropy, get_values
from slime.backends.megatron_utils.loss.reduction import Reducer


def sft_loss_function(
    args: Namespace, batch: dict[str, Any], logits: Tensor | Scores, reducer: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log p of the unmasked response tokens. Nothing was sampled, so neither temperature nor top-p records apply."""
    supervised = Namespace(**{**vars(args), "rollout_temperature": 1.0, "rollout_top_p": 1.0})
    _, out = get_log_probs_and_entropy(
        logits,
        args=supervised,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    loss = -reducer(torch.cat(out["log_probs"]))
    return loss, {"loss": loss}


def value_loss_function(
    args: Namespace, batch: dict[str, Any], values: Tensor, reducer: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((V' - R)^2, (V - R)^2) with V' = V_old + clamp(V - V_old, -value_clip, value_clip).

    values: [1, T, 1], the critic's output. batch: `values` (V_old) and `returns` (R), canonical.
    """
    _, out = get_values(
        values, args=args, total_lengths=batch["total_lengths"], response_lengths=batch["response_lengths"]
    )
    new, old, returns = torch.cat(out["values"]), torch.cat(batch["values"]), torch.cat(batch["returns"])
    change = new - old
    clipped = old + change.clamp(-args.value_clip, args.value_clip)
    loss = reducer(torch.maximum((clipped - returns).square(), (new - returns).square()))
    return loss, {"value_loss": loss, "value_clipfrac": reducer((change.abs() > args.value_clip).float())}
