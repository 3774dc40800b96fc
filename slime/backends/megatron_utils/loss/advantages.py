"""Advantages and returns of one rollout: the estimators, on-policy distillation and whitening.

Runs once a rollout on every rank of the last pipeline stage; per-token lists are canonical context-parallel slices.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime.backends.megatron_utils.cp_utils import (
    ParallelState,
    all_gather_with_cp,
    canonical_length,
    get_parallel_state,
    local_masks,
    slice_log_prob_with_cp,
)
from slime.backends.megatron_utils.loss.kl import compute_approx_kl
from slime.utils.misc import load_function

_SCAN_CHUNK = 128


def compute_advantages_and_returns(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Write `kl`, `advantages`, `returns` (and `opd_reverse_kl`) into rollout_data, per sample [canonical length].

    Reads rewards (floats, already normalised), loss_masks (int, whole response), total_lengths, response_lengths and,
    as the estimator needs, log_probs (or rollout_log_probs with use_rollout_logprobs), ref_log_probs, values,
    teacher_log_probs. Does nothing before the last pipeline stage. Collective over DP x CP with normalize_advantages,
    over CP for reinforce_plus_plus and ppo. Raises ValueError naming what is missing.
    """
    parallel = get_parallel_state()
    if not parallel.is_last_stage:
        return
    log_probs = rollout_data.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
    rollout_data["kl"] = kl = _per_token_kl(args, rollout_data, log_probs, parallel)

    if args.custom_advantage_function_path:
        load_function(args.custom_advantage_function_path)(args, rollout_data)
        missing = [key for key in ("advantages", "returns") if rollout_data.get(key) is None]
        if missing:
            path = args.custom_advantage_function_path
            raise ValueError(f"--custom-advantage-function-path {path} did not set {', '.join(missing)}")
    else:
        advantages, returns = _estimate(args, rollout_data, kl, parallel)
        rollout_data["advantages"], rollout_data["returns"] = advantages, returns

    if args.use_opd:
        _add_distillation(args, rollout_data, log_probs)
    if args.normalize_advantages:
        masks = local_masks(*(rollout_data[k] for k in ("loss_masks", "total_lengths", "response_lengths")), parallel)
        rollout_data["advantages"] = whiten(rollout_data["advantages"], masks, parallel)


def _per_token_kl(
    args: Namespace, data: dict[str, Any], log_probs: list[Tensor] | None, parallel: ParallelState
) -> list[Tensor]:
    """The estimate against the reference policy that shapes rewards; zeros without kl_coef."""
    if args.kl_coef == 0:
        lengths = zip(data["total_lengths"], data["response_lengths"], strict=True)
        device = data["loss_masks"][0].device
        return [torch.zeros(canonical_length(n, m, parallel), device=device) for n, m in lengths]
    if log_probs is None or data.get("ref_log_probs") is None:
        name = "ref_log_probs" if log_probs is not None else "log_probs"
        raise ValueError(f"--kl-coef {args.kl_coef} needs {name} in the rollout data, and they are missing")
    return [
        compute_approx_kl(new, ref, args.kl_loss_type)
        for new, ref in zip(log_probs, data["ref_log_probs"], strict=True)
    ]


def _estimate(
    args: Namespace, data: dict[str, Any], kl: list[Tensor], parallel: ParallelState
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns) by --advantage-estimator."""
    rewards = data["rewards"]
    match args.advantage_estimator:
        case "grpo" | "gspo" | "cispo":
            # A_t = R for every token; the group normalisation happened when the rewards were made.
            advantages = [torch.full_like(x, reward) for x, reward in zip(kl, rewards, strict=True)]
            return advantages, list(advantages)
        case "reinforce_plus_plus_baseline":
            advantages = [reward - args.kl_coef * x for x, reward in zip(kl, rewards, strict=True)]
            return advantages, list(advantages)
        case "reinforce_plus_plus":
            full_kl = _gather(kl, data, parallel)
            shaped = shaped_rewards(rewards, full_kl, data["loss_masks"], args.kl_coef)
            returns = discounted_suffix_sum(pad_sequence(shaped, batch_first=True), args.gamma)
            returns = _slice([row[: len(x)] for row, x in zip(returns, shaped, strict=True)], data, parallel)
            return returns, list(returns)
        case "ppo":
            if data.get("values") is None:
                raise ValueError("--advantage-estimator ppo needs the critic's values in the rollout data")
            masks = data["loss_masks"]
            values = _gather(data["values"], data, parallel)
            shaped = shaped_rewards(rewards, _gather(kl, data, parallel), masks, args.kl_coef)
            advantages, returns = gae(shaped, values, masks, args.gamma, args.lambd)
            return _slice(advantages, data, parallel), _slice(returns, data, parallel)
        case _:
            raise ValueError(
                f"--advantage-estimator {args.advantage_estimator!r}: choose grpo, gspo, cispo, reinforce_plus_plus, "
                "reinforce_plus_plus_baseline or ppo"
            )


def shaped_rewards(
    rewards: Sequence[float], kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """r_t = -kl_coef mask_t kl_t, plus the sample's reward at its last unmasked token; whole responses.

    A sample without unmasked tokens gets zeros: nothing of it is trained.
    """
    shaped = []
    for reward, sample_kl, mask in zip(rewards, kl, loss_masks, strict=True):
        token_rewards = -kl_coef * sample_kl * mask
        action = mask != 0
        last = action & (action.flip(0).cumsum(0).flip(0) == 1)
        shaped.append(token_rewards + reward * last)
    return shaped


def gae(
    rewards: Sequence[Tensor], values: Sequence[Tensor], loss_masks: Sequence[Tensor], gamma: float, lambd: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) over each sample's unmasked tokens.

    d_t = r_t + gamma V_{t+1} - V_t with V = 0 after the end; A_t = sum_k (gamma lambd)^k d_{t+k}; returns = A + V.
    Masked tokens (tool output) are not actions: the next action follows directly, and their own advantage is 0.
    """
    actions = [mask != 0 for mask in loss_masks]
    # Rows are padded with zero rewards and values, so padded differences are zero and the last action sees V = 0.
    packed_values = pad_sequence([v[a] for v, a in zip(values, actions, strict=True)], batch_first=True)
    packed_rewards = pad_sequence([r[a] for r, a in zip(rewards, actions, strict=True)], batch_first=True)
    next_values = torch.nn.functional.pad(packed_values, (0, 1))[:, 1:]
    packed = discounted_suffix_sum(packed_rewards + gamma * next_values - packed_values, gamma * lambd)
    advantages = []
    for row, value, action in zip(packed, values, actions, strict=True):
        advantage = torch.zeros_like(value)
        advantage[action] = row[: int(action.sum())]
        advantages.append(advantage)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def discounted_suffix_sum(x: Tensor, discount: float) -> Tensor:
    """y_t = sum_{s >= t} discount^(s - t) x_s along the rows of x [B, L].

    Chunks of 128 columns from the end: one product with the triangle of powers, then the carry from the chunk behind.
    """
    powers = torch.tensor([discount**k for k in range(_SCAN_CHUNK + 1)], dtype=x.dtype, device=x.device)
    steps = torch.arange(_SCAN_CHUNK, device=x.device)
    distance = steps.unsqueeze(1) - steps  # [source, target]: how far the source lies behind the target
    triangle = torch.where(distance >= 0, powers[distance.clamp(min=0)], 0)
    y = torch.empty_like(x)
    carry = x.new_zeros(x.size(0), 1)
    for stop in range(x.size(1), 0, -_SCAN_CHUNK):
        start = max(stop - _SCAN_CHUNK, 0)
        width = stop - start
        y[:, start:stop] = x[:, start:stop] @ triangle[:width, :width] + carry * powers[1 : width + 1].flip(0)
        carry = y[:, start : start + 1]
    return y


def whiten(values: Sequence[Tensor], masks: Sequence[Tensor], parallel: ParallelState) -> list[Tensor]:
    """(x - mean) / sqrt(var + 1e-8) per token, mean and variance over the unmasked tokens of all DP x CP ranks.

    Variance is Bessel-corrected and taken from deviations in float64: nearly equal advantages do not lose it to
    cancellation. Collective, also for ranks without tokens. Raises ValueError when no token at all is unmasked.
    """
    x = torch.cat(list(values)).double()
    mask = torch.cat(list(masks)).double()
    total, count = _sum_over_ranks(torch.stack([(x * mask).sum(), mask.sum()]), parallel).unbind()
    if count == 0:
        raise ValueError("--normalize-advantages: every token of this rollout is masked, nothing is left to average")
    mean = total / count
    squares = _sum_over_ranks((mask * (x - mean).square()).sum(), parallel)
    variance = squares / (count - 1).clamp(min=1)
    whitened = ((x - mean) * (variance + 1e-8).rsqrt()).to(values[0].dtype)
    return list(whitened.split([len(v) for v in values]))


def _sum_over_ranks(value: Tensor, parallel: ParallelState) -> Tensor:
    if parallel.dp_cp_size > 1:
        dist.all_reduce(value, group=parallel.dp_cp_group)
    return value


def _add_distillation(args: Namespace, data: dict[str, Any], log_probs: list[Tensor] | None) -> None:
    """On-policy distillation: A_t -= opd_kl_coef (log p_student - log p_teacher)."""
    teacher = data.get("teacher_log_probs")
    if log_probs is None or teacher is None:
        name = "teacher_log_probs" if teacher is None else "the student's log_probs"
        raise ValueError(f"--use-opd needs {name} in the rollout data, and they are missing")
    data["opd_reverse_kl"] = [s.float() - t.float() for s, t in zip(log_probs, teacher, strict=True)]
    data["advantages"] = [
        a - args.opd_kl_coef * d for a, d in zip(data["advantages"], data["opd_reverse_kl"], strict=True)
    ]


def _gather(values: Sequence[Tensor], data: dict[str, Any], parallel: ParallelState) -> list[Tensor]:
    lengths = zip(values, data["total_lengths"], data["response_lengths"], strict=True)
    return [all_gather_with_cp(x, n, m, parallel) for x, n, m in lengths]


def _slice(values: Sequence[Tensor], data: dict[str, Any], parallel: ParallelState) -> list[Tensor]:
    lengths = zip(values, data["total_lengths"], data["response_lengths"], strict=True)
    return [slice_log_prob_with_cp(x, n, m, parallel) for x, n, m in lengths]
