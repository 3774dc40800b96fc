"""Numbers that describe one rollout or one evaluation, computed from its samples. Pure functions; the driver writes
the result.
"""

import math
import statistics
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import Any

from slime.utils.misc import group_by, load_function
from slime.utils.types import Sample

REPETITION_WINDOW = 10_000  # characters
REPETITION_RATIO = 10  # the window counts as repetitive when zlib makes it more than this much smaller


def rollout_metrics(
    rollout_id: int, args: Namespace, samples: list[Sample], extra_metrics: dict[str, Any] | None, rollout_time: float
) -> dict[str, float]:
    """rollout/* and perf/* of a training rollout, with the rollout function's own `extra_metrics` (their names
    unchanged); multi_turn/* with --log-multi-turn, passrate/pass@k with --log-passrate.

    samples: flat. rollout_time: seconds. {} when `--custom-rollout-log-function-path` says that it did the logging.
    """
    if args.custom_rollout_log_function_path:
        log = load_function(args.custom_rollout_log_function_path)
        if log(rollout_id, args, samples, extra_metrics, rollout_time):
            return {}
    metrics = {f"rollout/{name}": value for name, value in sample_metrics(args, samples).items()}
    rewards = _numeric_rewards(args, samples)
    if rewards:
        metrics["rollout/raw_reward"] = statistics.fmean(rewards)
    metrics |= {f"perf/{name}": value for name, value in perf_metrics(args, samples, rollout_time).items()}
    if args.log_multi_turn:
        metrics |= {f"multi_turn/{name}": value for name, value in multi_turn_metrics(args, samples).items()}
    if args.log_passrate and rewards:
        metrics |= {f"passrate/pass@{k}": value for k, value in _group_pass_rates(samples, rewards).items()}
    return metrics | (extra_metrics or {})


def eval_metrics(
    rollout_id: int, args: Namespace, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None
) -> dict[str, float]:
    """eval/* of every dataset; {} when `--custom-eval-rollout-log-function-path` says that it did the logging.

    eval/<name>: mean reward. eval/<name>-truncated_ratio. eval/<name>-pass@k with --log-passrate. eval/<name>/*: see
    sample_metrics.
    """
    if args.custom_eval_rollout_log_function_path:
        log = load_function(args.custom_eval_rollout_log_function_path)
        if log(rollout_id, args, data, extra_metrics):
            return {}
    metrics: dict[str, float] = {}
    for name, entry in data.items():
        rewards, truncated = entry["rewards"], entry["truncated"]
        if not rewards:
            raise ValueError(f"eval dataset {name!r} produced no samples")
        metrics[f"eval/{name}"] = statistics.fmean(rewards)
        metrics[f"eval/{name}-truncated_ratio"] = statistics.fmean(truncated)
        samples = entry.get("samples")
        if samples:
            metrics |= {f"eval/{name}/{key}": value for key, value in sample_metrics(args, samples).items()}
        if samples and args.log_passrate:
            rates = _group_pass_rates(samples, rewards)
            metrics |= {f"eval/{name}-pass@{k}": value for k, value in rates.items()}
    return metrics | (extra_metrics or {})


def sample_metrics(args: Namespace, samples: list[Sample]) -> dict[str, float]:
    """What can be said of any set of samples: lengths (tokens that are trained), group spread, cache, truncation,
    repetition.
    """
    lengths = [sample.effective_response_length for sample in samples]
    metrics = {f"response_len/{name}": value for name, value in spread(lengths).items()}
    metrics |= _zero_std(args, samples) | _engine_counters(args, samples)
    if args.log_reward_category:
        counts = Counter(str(s.reward[args.log_reward_category]) for s in samples if isinstance(s.reward, dict))
        metrics |= {f"error_cat/{category}": count / len(samples) for category, count in counts.items()}
    metrics["repetition_frac"] = statistics.fmean(is_repetitive(sample.response) for sample in samples)
    metrics["truncated_ratio"] = _status_ratio(samples, Sample.Status.TRUNCATED)
    for status in (Sample.Status.ABORTED, Sample.Status.FAILED):
        if ratio := _status_ratio(samples, status):
            metrics[f"{status.value}_ratio"] = ratio
    return metrics


def perf_metrics(args: Namespace, samples: list[Sample], rollout_time: float) -> dict[str, float]:
    """Speed of a rollout that took `rollout_time` seconds; tokens per GPU count the rollout's GPUs (1 where there are
    none).
    """
    gpus = args.rollout_num_gpus or 1
    lengths = {"": [s.response_length for s in samples], "effective_": [s.effective_response_length for s in samples]}
    away = [sample.non_generation_time for sample in samples]
    metrics = {"rollout_time": rollout_time}
    if any(away):
        metrics |= {f"non_generation_time/{name}": value for name, value in spread(away).items()}
    for kind, values in lengths.items():
        metrics[f"{kind}tokens_per_gpu_per_sec"] = sum(values) / gpus / rollout_time
        longest = max(range(len(values)), key=values.__getitem__)
        metrics[f"longest_{kind}sample_tokens_per_sec"] = values[longest] / rollout_time
        generating = rollout_time - away[longest]
        if any(away) and generating > 0:
            metrics[f"longest_{kind}sample_non_generation_time"] = away[longest]
            metrics[f"longest_{kind}sample_tokens_per_sec_without_non_generation"] = values[longest] / generating
    return metrics


def multi_turn_metrics(args: Namespace, samples: list[Sample]) -> dict[str, float]:
    """Lengths (tokens) of responses with (raw) and without (wo_obs) what tools and environments put in, and rounds.

    clip_ratio: responses of at least --rollout-max-response-len tokens. Rounds are those of the samples whose metadata
    has a round_number; without any there is no such metric.
    """
    raw = [sample.response_length for sample in samples]
    generated = [sample.effective_response_length for sample in samples]
    rounds = [sample.metadata["round_number"] for sample in samples if "round_number" in sample.metadata]
    metrics = _mean_max_min("raw_response_length/response_length", raw)
    if args.rollout_max_response_len is not None:
        clipped = statistics.fmean(length >= args.rollout_max_response_len for length in raw)
        metrics["raw_response_length/response_length_clip_ratio"] = clipped
    metrics |= _mean_max_min("wo_obs_response_length/response_length", generated)
    return metrics | (_mean_max_min("multi_turn_metric/round_number", rounds) if rounds else {})


def spread(values: Sequence[float]) -> dict[str, float]:
    """mean, median, max and min of at least one value."""
    return {
        "mean": statistics.fmean(values),
        "median": float(statistics.median(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }


def pass_rates(correct: list[list[bool]]) -> dict[int, float]:
    """pass@k for k = 1, 2, 4, ... up to the smallest group, averaged over groups.

    correct: per prompt, whether each of its n answers is right. Per prompt 1 - C(n - c, k) / C(n, k), the unbiased
    estimate of Chen et al. 2021 (arXiv 2107.03374).
    """
    largest, rates, k = min(len(group) for group in correct), {}, 1
    while k <= largest:
        rates[k] = statistics.fmean(
            1 - math.comb(len(group) - sum(group), k) / math.comb(len(group), k) for group in correct
        )
        k *= 2
    return rates


def _group_pass_rates(samples: list[Sample], rewards: Sequence[float]) -> dict[int, float]:
    """pass_rates of the samples' groups; an answer is right when its reward is 1."""
    groups = group_by(zip(samples, rewards, strict=True), lambda pair: pair[0].group_index)
    return pass_rates([[reward == 1 for _, reward in group] for group in groups.values()])


def _mean_max_min(prefix: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in spread(values).items() if name != "median"}


def is_repetitive(text: str) -> bool:
    """Whether the last 10,000 characters of a longer text compress more than tenfold (zlib, level 9)."""
    if len(text) <= REPETITION_WINDOW:
        return False
    window = text[-REPETITION_WINDOW:].encode()
    return len(window) > REPETITION_RATIO * len(zlib.compress(window, 9))


def _numeric_rewards(args: Namespace, samples: list[Sample]) -> list[float]:
    """The rewards as numbers, or [] where they are something else that a custom post-process will read."""
    values = [sample.reward if args.reward_key is None else sample.get_reward_value(args) for sample in samples]
    return values if all(isinstance(value, int | float) and math.isfinite(value) for value in values) else []


def _zero_std(args: Namespace, samples: list[Sample]) -> dict[str, float]:
    """Number of groups whose rewards are all equal, by that reward; these have no group advantage."""
    grouped = [sample for sample in samples if sample.group_index is not None]
    if args.advantage_estimator == "ppo" or not grouped or not _numeric_rewards(args, grouped):
        return {}
    counts: Counter[float] = Counter()
    for group in group_by(grouped, lambda sample: sample.group_index).values():
        rewards = {sample.get_reward_value(args) for sample in group}
        if len(rewards) == 1:
            counts[round(float(rewards.pop()), 1)] += 1
    return {f"zero_std/count_{reward:g}": float(count) for reward, count in counts.items()}


def _engine_counters(args: Namespace, samples: list[Sample]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if getattr(args, "sglang_speculative_algorithm", None):
        drafted = sum(s.spec_info.spec_draft_token_num for s in samples)
        verified = sum(s.spec_info.spec_verify_ct for s in samples)
        if drafted and verified:
            metrics["spec_accept_rate"] = sum(s.spec_info.spec_accept_token_num for s in samples) / drafted
            metrics["spec_accept_length"] = sum(s.spec_info.completion_token_num for s in samples) / verified
    prompt_tokens = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    if prompt_tokens:
        cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
        metrics["prefix_cache_hit_rate"] = cached / prompt_tokens
        metrics["avg_cached_tokens_per_sample"] = cached / len(samples)
    kept = [s for s in samples if s.rollout_top_p_token_ids is not None]
    if kept:
        tokens = sum(s.effective_response_length for s in kept)
        metrics["top_p_kept_vocab_per_token"] = sum(len(s.rollout_top_p_token_ids) for s in kept) / max(tokens, 1)
    return metrics


def _status_ratio(samples: list[Sample], status: Sample.Status) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)
