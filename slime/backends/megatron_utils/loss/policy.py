"""The policy-gradient loss: clipped ratios per token or sequence, KL and entropy terms, off-policy corrections."""

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import get_parallel_state
from slime.backends.megatron_utils.loss.corrections import apply_correction
from slime.backends.megatron_utils.loss.kl import compute_approx_kl
from slime.backends.megatron_utils.loss.log_probs import Scores, get_log_probs_and_entropy
from slime.backends.megatron_utils.loss.reduction import Reducer, make_reducer, sequence_mean
from slime.utils.misc import load_function


def policy_loss_function(
    args: Namespace, batch: dict[str, Any], logits: Tensor | Scores, reducer: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss = pg - entropy_coef H + kl_loss_coef KL of one micro-batch, each term a `reducer` sum, and its metrics.

    logits: [1, T, V / tp], or `Scores`. batch: unconcat_tokens, total_lengths, response_lengths, loss_masks (whole
    responses) and per-sample canonical lists: advantages and, as flags need, log_probs, rollout_log_probs,
    ref_log_probs. The policy that the ratio refers to is rollout_log_probs with use_rollout_logprobs, else log_probs,
    else the current one.
    Raises ValueError naming a list that a flag needs and the batch lacks.
    """
    _, current = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        top_p_token_ids=batch.get("rollout_top_p_token_ids"),
        top_p_token_offsets=batch.get("rollout_top_p_token_offsets"),
    )
    log_probs, entropy = torch.cat(current["log_probs"]), torch.cat(current["entropy"])
    # Without a pass of its own before the step, the policy before the step is the current one: every ratio is 1.
    train_log_probs = batch.get("log_probs") or [x.detach() for x in current["log_probs"]]
    old = (
        _required(batch, "rollout_log_probs", "--use-rollout-logprobs")
        if args.use_rollout_logprobs
        else train_log_probs
    )
    counts = [len(x) for x in current["log_probs"]]
    log_ratio = log_probs - torch.cat(old)

    pg_loss, ratio, metrics = _surrogate(args, batch, log_probs, log_ratio, counts, reducer)
    pg_reducer, masks = reducer, batch["loss_masks"]
    if args.use_tis or args.get_mismatch_metrics:
        pg_loss, masks, correction = apply_correction(args, batch, pg_loss, train_log_probs)
        metrics |= {name: reducer(value) for name, value in correction.items()}
        metrics["ois"] = reducer(ratio)
        pg_reducer = reducer = make_reducer(args, batch, masks, get_parallel_state())
    if args.custom_pg_loss_reducer_function_path:
        pg_reducer = load_function(args.custom_pg_loss_reducer_function_path)(
            batch["total_lengths"], batch["response_lengths"], masks, args.calculate_per_token_loss
        )

    loss = metrics["pg_loss"] = pg_reducer(pg_loss)
    metrics["entropy_loss"] = reducer(entropy)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * metrics["entropy_loss"]
    if args.use_kl_loss:
        importance = log_ratio.exp() if args.use_unbiased_kl else None
        reference = torch.cat(_required(batch, "ref_log_probs", "--use-kl-loss"))
        metrics["kl_loss"] = reducer(compute_approx_kl(log_probs, reference, args.kl_loss_type, importance))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    if batch.get("rollout_log_probs"):
        trained = log_probs.detach() if args.use_rollout_logprobs else torch.cat(train_log_probs)
        metrics["train_rollout_logprob_abs_diff"] = reducer((trained - torch.cat(batch["rollout_log_probs"])).abs())
    if batch.get("opd_reverse_kl"):
        metrics["opd_reverse_kl"] = reducer(torch.cat(batch["opd_reverse_kl"]))
    return loss, {"loss": loss, **metrics}


def _surrogate(
    args: Namespace, batch: dict[str, Any], log_probs: Tensor, log_ratio: Tensor, counts: list[int], reducer: Reducer
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(per-token loss, ratio, metrics) of the estimator's objective, all [local response tokens], before reduction."""
    advantages = torch.cat(_required(batch, "advantages", "--loss-type policy_loss"))
    per_sequence = args.advantage_estimator == "gspo"
    if per_sequence or args.use_opsm:
        sequence_log_ratio = sequence_mean(log_ratio, batch, counts, get_parallel_state())
    if per_sequence:
        log_ratio = sequence_log_ratio
    ratio = log_ratio.exp()
    if args.advantage_estimator == "cispo":
        pg_loss, clipped = cispo_loss(ratio, log_probs, advantages, args.eps_clip, args.eps_clip_high)
    else:
        pg_loss, clipped = clipped_loss(ratio, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    metrics = {"pg_clipfrac": reducer(clipped), "ppo_kl": reducer(-log_ratio)}
    if args.use_opsm:
        # Off-policy sequence masking: bad samples that the policy has already moved away from teach nothing.
        dropped = (advantages < 0) & (-sequence_log_ratio > args.opsm_delta)
        pg_loss = torch.where(dropped, 0, pg_loss)
        metrics["opsm_clipfrac"] = reducer(dropped.float())
    return pg_loss, ratio, metrics


def clipped_loss(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, eps_dual: float | None
) -> tuple[Tensor, Tensor]:
    """max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A) (PPO, Schulman et al. 2017), and 1 where the clipped term won.

    eps_dual c > 1 bounds the loss of bad actions: min(-c A, loss) where A < 0 (dual clip, Ye et al. 2020).
    """
    if eps_dual is not None and eps_dual <= 1:
        raise ValueError(f"--eps-clip-c {eps_dual} must be greater than 1 (a usual value is 3)")
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(-eps_dual * advantages, loss), loss)
    return loss, (clipped > plain).float()


def cispo_loss(
    ratio: Tensor, log_probs: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """-sg[clip(r)] A log p (MiniMax-M1, 2025), and 1 where r was clipped: every token keeps a gradient."""
    weight = ratio.detach().clamp(1 - eps_low, 1 + eps_high)
    return -weight * advantages * log_probs, (weight != ratio).float()


def _required(batch: dict[str, Any], key: str, flag: str) -> list[Tensor]:
    if batch.get(key) is None:
        raise ValueError(f"{flag} needs {key}, but the training batch has none")
    return batch[key]
