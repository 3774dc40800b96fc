"""From samples to what the trainer eats: a dict of per-sample lists, rewards normalised, then one such dict per data-
parallel rank.
"""

import logging
import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slime.utils.data import get_source
from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

GROUP_NORMALISED_ESTIMATORS = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
STD_NORMALISED_ESTIMATORS = frozenset({"grpo", "gspo", "cispo"})
REWARD_STD_EPS = 1e-6

TENSOR_DTYPES = {
    "tokens": torch.int64,
    "loss_masks": torch.int32,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "rollout_top_p_token_ids": torch.int32,
    "rollout_top_p_token_offsets": torch.int32,
}
# What a sample without response tokens has of a per-token record, whether anybody wrote it down or not.
NOTHING_RECORDED = {
    "rollout_log_probs": [],
    "teacher_log_probs": [],
    "rollout_top_p_token_ids": [],
    "rollout_top_p_token_offsets": [0],
}
PAD_TOKEN_ID = 0
WHOLE_BATCH_KEYS = frozenset({"raw_reward", "total_lengths"})  # every rank gets these for all samples
REQUIRED_KEYS = ("tokens", "response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "loss_masks")


def convert_samples_to_train_data(args: Namespace, samples: list[Sample]) -> dict[str, list]:
    """Train data of a rollout: each key maps to a list with one entry per sample, in the order of `samples`.

    tokens: ids, prompt and response. response_lengths. rewards: normalised. raw_reward. truncated: 0/1.
    sample_indices. rollout_ids: equal for samples split from one execution. loss_masks: 0/1, response_length each.
    rollout_mask_sums: trainable tokens of the whole execution, the denominator of the loss. source_names. When any
    sample has them: rollout_log_probs, teacher_log_probs, rollout_routed_experts, round_number,
    multimodal_train_inputs, metadata (train_metadata); with --rollout-top-p below 1 the nucleus ids.
    A sample without response trains nothing, but counts in its group and step; one without any token gets one.

    `--custom-convert-samples-to-train-data-path` replaces the conversion; missing rollout_ids and rollout_mask_sums
    are filled in. Raises ValueError that names the sample for any broken invariant.
    """
    if not samples:
        raise ValueError("the rollout produced no samples to train on")
    if args.custom_convert_samples_to_train_data_path:
        return _complete_custom(args, load_function(args.custom_convert_samples_to_train_data_path)(args, samples))
    for sample in samples:
        sample.validate()
    raw_rewards, rewards = post_process_rewards(args, samples)
    data: dict[str, list] = {
        "tokens": [sample.tokens or [PAD_TOKEN_ID] for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": [s.metadata.get("raw_reward", raw) for s, raw in zip(samples, raw_rewards, strict=True)],
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [i if sample.index is None else sample.index for i, sample in enumerate(samples)],
        "rollout_ids": _fill_ids([sample.rollout_id for sample in samples]),
        "loss_masks": [_loss_mask(sample) for sample in samples],
        "source_names": [get_source(sample) for sample in samples],
    }
    data["rollout_mask_sums"] = _rollout_mask_sums(data["loss_masks"], data["rollout_ids"])
    return data | _optional_columns(args, samples)


def post_process_rewards(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(raw, normalised) rewards of the samples, from `--custom-reward-post-process-path` or by group normalisation.

    Normalisation applies to grpo, gspo, cispo and reinforce_plus_plus_baseline unless --disable-rewards-normalization:
    the mean of the sample's group is subtracted; for the first three the result is divided by the group's unbiased
    standard deviation + 1e-6, unless --disable-grpo-std-normalization. Computed in float64; groups may have any size,
    a group of one or of equal rewards gives zeros.
    """
    if args.custom_reward_post_process_path:
        raw, rewards = load_function(args.custom_reward_post_process_path)(args, samples)
        raw, rewards = _as_list(raw), _as_list(rewards)
        if not len(raw) == len(rewards) == len(samples):
            raise ValueError(
                f"--custom-reward-post-process-path returned {len(raw)} raw and {len(rewards)} rewards for "
                f"{len(samples)} samples"
            )
        return raw, rewards
    raw = [sample.get_numeric_reward(args) for sample in samples]
    if args.advantage_estimator not in GROUP_NORMALISED_ESTIMATORS or not args.rewards_normalization:
        return raw, list(raw)
    by_std = args.advantage_estimator in STD_NORMALISED_ESTIMATORS and args.grpo_std_normalization
    rewards = [0.0] * len(raw)
    for positions in _group_positions(args, samples).values():
        normalised = normalise_group([raw[p] for p in positions], by_std=by_std)
        for position, value in zip(positions, normalised, strict=True):
            rewards[position] = value
    return raw, rewards


def normalise_group(rewards: Sequence[float], *, by_std: bool) -> list[float]:
    """(r - mean) or (r - mean) / (unbiased std + 1e-6) of one group; zeros when all rewards are equal."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    scale = statistics.stdev(rewards) + REWARD_STD_EPS if by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]


def split_train_data_by_dp(
    args: Namespace, data: dict[str, list], parallel_config: dict[str, int]
) -> list[dict[str, Any]]:
    """One dict per data-parallel rank (context parallelism not counted), scheduled by build_dp_schedule.

    Each holds its samples' entries of every per-sample key, in the order of `partition` (positions in the whole
    rollout); for the whole rollout raw_reward and total_lengths; and the schedule: partition, micro_batch_indices,
    num_microbatches, global_batch_sizes. Tensors are on the CPU: tokens int64; loss masks and nucleus ids int32; log-
    probs float32; rollout_mask_sums one float32 [samples].
    """
    num_samples = len(data["tokens"])
    total_lengths = [len(tokens) for tokens in data["tokens"]]
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build_dp_schedule(
        args,
        parallel_config,
        total_lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=data["rollout_ids"],
    )
    for key, values in data.items():
        if len(values) != num_samples:
            raise ValueError(f"train data key {key!r} has {len(values)} entries for {num_samples} samples")
    shards = []
    for partition, indices in zip(partitions, micro_batch_indices, strict=True):
        shard = {k: _column(k, v, partition) for k, v in data.items() if k not in WHOLE_BATCH_KEYS}
        shard |= {
            "partition": partition,
            "raw_reward": data["raw_reward"],
            "total_lengths": total_lengths,
            "micro_batch_indices": indices,
            "num_microbatches": num_microbatches,
            "global_batch_sizes": global_batch_sizes,
        }
        shards.append(shard)
    return shards


def _column(key: str, values: list, partition: list[int]) -> Any:
    chosen = [values[position] for position in partition]
    if key == "rollout_mask_sums":
        return torch.tensor(chosen, dtype=torch.float32)
    dtype = TENSOR_DTYPES.get(key)
    return chosen if dtype is None else [_tensor(value, dtype) for value in chosen]


def _tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor that owns its memory, so that it is sent without the storage it may be a view of."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", dtype, copy=True)
    if isinstance(value, list) and len(value) > 64:
        value = np.array(value, dtype=np.float64 if dtype.is_floating_point else np.int64)
    return torch.tensor(value, dtype=dtype)


def _group_positions(args: Namespace, samples: list[Sample]) -> dict[int, list[int]]:
    """Positions of the samples of each group: by group_index; when no sample has one, consecutive runs of
    n_samples_per_prompt.
    """
    missing = sum(sample.group_index is None for sample in samples)
    n = args.n_samples_per_prompt
    if missing == len(samples) and missing % n == 0:
        return {start: list(range(start, start + n)) for start in range(0, missing, n)}
    if missing:
        raise ValueError(
            f"{missing} of {len(samples)} samples have no group_index, so their rewards cannot be normalised per "
            f"prompt: set it on all samples, or on none and return a multiple of --n-samples-per-prompt {n} samples, "
            "or pass --disable-rewards-normalization"
        )
    groups: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(position)
    return groups


def _loss_mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


def _fill_ids(ids: list[int | None]) -> list[int]:
    """Give every None the smallest non-negative integer that no one uses yet, in order."""
    used = {i for i in ids if i is not None}
    filled, candidate = [], 0
    for i in ids:
        if i is None:
            while candidate in used:
                candidate += 1
            i = candidate
            candidate += 1
        filled.append(i)
    return filled


def _rollout_mask_sums(loss_masks: list, rollout_ids: list[int]) -> list[int]:
    """Per sample, the trainable tokens of all samples that share its rollout id."""
    sums: dict[int, int] = {}
    for mask, rollout_id in zip(loss_masks, rollout_ids, strict=True):
        sums[rollout_id] = sums.get(rollout_id, 0) + int(sum(mask))
    return [sums[rollout_id] for rollout_id in rollout_ids]


def _optional_columns(args: Namespace, samples: list[Sample]) -> dict[str, list]:
    columns: dict[str, list] = {}
    for key in ("rollout_log_probs", "teacher_log_probs", "rollout_routed_experts"):
        _add_if_any(columns, key, samples, [getattr(sample, key) for sample in samples])
    _add_if_any(columns, "round_number", samples, [sample.metadata.get("round_number") for sample in samples])
    if args.rollout_top_p != 1.0:
        for key in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
            columns[key] = _complete(key, samples, [getattr(sample, key) for sample in samples])
    for key, values in (
        ("multimodal_train_inputs", [sample.multimodal_train_inputs for sample in samples]),
        ("metadata", [sample.train_metadata for sample in samples]),
    ):
        if any(value is not None for value in values):
            columns[key] = values
    return columns


def _add_if_any(columns: dict[str, list], key: str, samples: list[Sample], values: list) -> None:
    per_token = key in NOTHING_RECORDED
    pairs = zip(samples, values, strict=True)
    if any(value is not None and (sample.response_length or not per_token) for sample, value in pairs):
        columns[key] = _complete(key, samples, values)


def _complete(key: str, samples: list[Sample], values: list) -> list:
    if key in NOTHING_RECORDED:
        pairs = zip(samples, values, strict=True)
        values = [value if sample.response_length else NOTHING_RECORDED[key] for sample, value in pairs]
    lacking = [sample for sample, value in zip(samples, values, strict=True) if value is None]
    if lacking:
        first = lacking[0]
        raise ValueError(
            f"{len(lacking)} of {len(samples)} samples have no {key}, first sample index={first.index} "
            f"group_index={first.group_index} status={first.status.value}: all samples of a rollout must have it, or "
            "(unless --rollout-top-p asks for it) none"
        )
    return values


def _complete_custom(args: Namespace, data: dict[str, list]) -> dict[str, list]:
    path = args.custom_convert_samples_to_train_data_path
    if missing := [key for key in REQUIRED_KEYS if key not in data]:
        raise ValueError(
            f"--custom-convert-samples-to-train-data-path {path} returned no {', '.join(missing)} (keys: "
            f"{', '.join(data)})"
        )
    num_samples = len(data["tokens"])
    data = dict(data)
    data["rollout_ids"] = _fill_ids(list(data.get("rollout_ids", [None] * num_samples)))
    if "rollout_mask_sums" not in data:
        data["rollout_mask_sums"] = _rollout_mask_sums(data["loss_masks"], data["rollout_ids"])
    return data


def _as_list(values: Any) -> list:
    return values.tolist() if hasattr(values, "tolist") else list(values)
