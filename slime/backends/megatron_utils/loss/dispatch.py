"""The function Megatron's schedule calls with a micro-batch's scores: picks the loss, scales it, refuses NaN."""

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.backends.megatron_utils.cp_utils import canonical_length, get_parallel_state
from slime.backends.megatron_utils.loss.log_probs import Scores, get_log_probs_and_entropy
from slime.backends.megatron_utils.loss.policy import policy_loss_function
from slime.backends.megatron_utils.loss.reduction import count_tokens, make_reducer
from slime.backends.megatron_utils.loss.supervised import sft_loss_function, value_loss_function
from slime.backends.megatron_utils.loss.vocab_parallel import vocab_parallel_log_probs
from slime.utils.misc import load_function

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class NonFiniteLossError(FloatingPointError):
    """A micro-batch's loss is NaN or infinite; the message names step, samples and the values at fault."""


def loss_function(
    args: Namespace, batch: dict[str, Any], num_microbatches: int, step_global_batch_size: int, scores: Tensor | Scores
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(loss, normaliser, log) of one micro-batch, scaled so that Megatron averages to the mean over a step.

    scores: the model's logits [1, T, V / tp], a critic's values [1, T, 1], or `Scores`, of which a custom loss gets
    the logits.

    Per-rollout mean: Megatron divides by the normaliser (1) and num_microbatches and averages gradients over DP x CP,
    so loss = reduced * num_microbatches * (dp cp) / step_global_batch_size. Per token: gradients are summed and
    divided by the all-reduced normaliser, which every CP rank counts in full, so loss = reduced * cp. A fully masked
    micro-batch has the normaliser 0; Megatron clamps the total.

    log: {"keys": [...], "values": float32 [1 + keys]}; values[0] is the normaliser per token, else 0; then the
    reducer's sums. Raises NonFiniteLossError; costs one scalar test.
    """
    parallel = get_parallel_state()
    reducer = make_reducer(args, batch, batch["loss_masks"], parallel)
    compute = partial(_select(args), args, batch)
    if args.loss_type == "custom_loss" and not isinstance(scores, Tensor):
        scores = scores.logits()
    if args.recompute_loss_function:
        loss, metrics = checkpoint(compute, scores, reducer, use_reentrant=False)
    else:
        loss, metrics = compute(scores, reducer)
    lengths = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    if not any(canonical_length(n, m, parallel) for n, m in lengths):
        # No token of this rank trains; a custom loss may then ignore the scores, but every rank must run backward.
        loss = loss + 0 * _connected(scores)
    if not torch.isfinite(loss):
        raise NonFiniteLossError(_explain(args, batch, loss, metrics, scores))

    if args.calculate_per_token_loss:
        normaliser = logged = count_tokens(batch["loss_masks"]).to(scores.device)
        loss = loss * parallel.cp_size
    else:
        normaliser, logged = torch.ones((), dtype=torch.int32, device=scores.device), 0
        loss = loss * (num_microbatches * parallel.dp_cp_size / step_global_batch_size)
    values = [
        torch.as_tensor(v, dtype=torch.float32, device=scores.device).detach() for v in (logged, *metrics.values())
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


def _connected(scores: Tensor | Scores) -> Tensor:
    """A scalar through which backward reaches the model: the sum of logits, or of no log-probability."""
    if isinstance(scores, Tensor):
        return scores.sum()
    hidden, head = scores.projection()
    nothing = torch.zeros(0, dtype=torch.int64, device=hidden.device)
    log_probs, _ = vocab_parallel_log_probs(hidden, nothing, nothing, **head)
    return log_probs.sum()


@torch.no_grad()
def _explain(
    args: Namespace, batch: dict[str, Any], loss: Tensor, metrics: dict[str, Tensor], scores: Tensor | Scores
) -> str:
    """Which samples of the micro-batch hold non-finite values, and in which per-token list."""
    columns = {
        key: batch[key]
        for key in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "returns", "values")
        if batch.get(key)
    }
    if args.loss_type != "value_loss":
        unrestricted = Namespace(**{**vars(args), "rollout_top_p": 1.0})
        _, current = get_log_probs_and_entropy(
            scores,
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
