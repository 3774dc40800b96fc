"""The function Megatron's schedule calls with a micro-batch's logits: picks the loss, scales it, refuses NaN."""

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.backends.megatron_utils.cp_utils import canonical_length, get_parallel_state, require_zigzag
from slime.backends.megatron_utils.loss.log_probs import get_log_probs_and_entropy
from slime.backends.megatron_utils.loss.policy import policy_loss_function
from slime.backends.megatron_utils.loss.reduction import count_tokens, make_reducer
from slime.backends.megatron_utils.loss.supervised import sft_loss_function, value_loss_function
from slime.utils.misc import load_function

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class NonFiniteLossError(FloatingPointError):
    """A micro-batch's loss is NaN or infinite; the message names step, samples and the values at fault."""


def loss_function(
    args: Namespace, batch: dict[str, Any], num_microbatches: int, step_global_batch_size: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(loss, normaliser, log) of one micro-batch, scaled so that Megatron averages to the mean over a step.

    Per-rollout mean: Megatron divides by the normaliser (1) and num_microbatches and averages gradients over DP x CP,
    so loss = reduced * num_microbatches * (dp cp) / step_global_batch_size. Per token: gradients are summed and
    divided by the all-reduced normaliser, which every CP rank counts in full, so loss = reduced * cp. A fully masked
    micro-batch has the normaliser 0; Megatron clamps the total.

    log: {"keys": [...], "values": float32 [1 + keys]}; values[0] is the normaliser per token, else 0; then the
    reducer's sums. Raises NonFiniteLossError; costs one scalar test.
    """
    parallel = get_parallel_state()
    require_zigzag(args, parallel)
    reducer = make_reducer(args, batch, batch["loss_masks"], parallel)
    compute = partial(_select(args), args, batch)
    if args.recompute_loss_function:
        loss, metrics = checkpoint(compute, logits, reducer, use_reentrant=False)
    else:
        loss, metrics = compute(logits, reducer)
    lengths = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    if not any(canonical_length(n, m, parallel) for n, m in lengths):
        # No token of this rank trains; a custom loss may then ignore the logits, but every rank must run backward.
        loss = loss + 0 * logits.sum()
    if not torch.isfinite(loss):
        raise NonFiniteLossError(_explain(args, batch, loss, metrics, logits))

    if args.calculate_per_token_loss:
        normaliser = logged = count_tokens(batch["loss_masks"]).to(logits.device)
        loss = loss * parallel.cp_size
    else:
        normaliser, logged = torch.ones((), dtype=torch.int32, device=logits.device), 0
        loss = loss * (num_microbatches * parallel.dp_cp_size / step_global_batch_size)
    values = [
        torch.as_tensor(v, dtype=torch.float32, device=logits.device).detach() for v in (logged, *metrics.values())
    ]
    return loss, normaliser, {"keys": list(metrics), "values": torch.stack(values)}


def _select(args: Namespace) -> LossFunction:
    match args.loss_type:
        case "policy_loss":
            return policy_loss_function
        case "value_loss":
            return value_loss_function
        case "sft_loss":
            return sft_loss_function
        case "custom_loss":
            if not args.custom_loss_function_path:
                raise ValueError("--loss-type custom_loss needs --custom-loss-function-path")
            return load_function(args.custom_loss_function_path)
        case _:
            raise ValueError(f"--loss-type {args.loss_type!r}: choose policy_loss, sft_loss or custom_loss")


@torch.no_grad()
def _explain(args: Namespace, batch: dict[str, Any], loss: Tensor, metrics: dict[str, Tensor], logits: Tensor) -> str:
    """Which samples of the micro-batch hold non-finite values, and in which per-token list."""
    columns = {
        key: batch[key]
        for key in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "returns", "values")
        if batch.get(key)
    }
    if args.loss_type != "value_loss":
        unrestricted = Namespace(**{**vars(args), "rollout_top_p": 1.0})
        _, current = get_log_probs_and_entropy(
            logits,
            args=unrestricted,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )
        columns["the model's log-probabilities"] = current["log_probs"]
    names = batch.get("sample_indices") or list(range(len(batch["total_lengths"])))
    faults = []
    for position, name in enumerate(names):
        bad = [key for key, column in columns.items() if not torch.isfinite(column[position]).all()]
        if bad:
            faults.append(f"sample {name} ({', '.join(bad)})")
    where = batch.get("step_name") or "a training step"
    terms = ", ".join(f"{key} {float(value):g}" for key, value in metrics.items() if not math.isfinite(value))
    cause = "; ".join(faults) if faults else f"no per-token input is, but these terms are: {terms or 'the loss alone'}"
    return f"loss {float(loss):g} in {where}, micro-batch of samples {names}; not finite: {cause}"
