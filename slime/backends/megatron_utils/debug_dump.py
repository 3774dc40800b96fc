"""`--save-debug-train-data`: what a rank trained on, with what it computed, as one file to look at or compare."""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from slime.backends.megatron_utils.cp_utils import all_gather_with_cp

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
_SLICED_KEYS = (
    "rollout_log_probs",
    "teacher_log_probs",
    "log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "returns",
    "kl",
    "entropy",
    "opd_reverse_kl",
)
_WHOLE_KEYS = ("tokens", "loss_masks", "total_lengths", "response_lengths", "rewards", "truncated", "rollout_ids")
_SHARD_KEYS = ("sample_indices", "partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")


def save_train_data(args: Namespace, rollout_id: int, data: dict[str, Any]) -> None:
    """Gather the batch over data-parallel ranks and write it, from the first of them on TP rank 0 of the last stage.

    Collective over all ranks of the last pipeline stage; other stages return at once. Context-parallel slices are
    restored to full responses. The file holds `samples`, sorted by their position in the rollout, and `dp_shards`,
    the schedule per rank.
    """
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return
    samples = _local_samples(data)
    if mpu.get_tensor_model_parallel_rank() != 0 or mpu.get_context_parallel_rank() != 0:
        return
    shard = {key: data[key] for key in _SHARD_KEYS if key in data}
    shard |= {"rank": dist.get_rank(), "data_parallel_rank": mpu.get_data_parallel_rank()}
    group = mpu.get_data_parallel_group_gloo()
    first = mpu.get_data_parallel_src_rank()
    gathered = [None] * mpu.get_data_parallel_world_size() if dist.get_rank() == first else None
    dist.gather_object((samples, shard), gathered, dst=first, group=group)
    if gathered is None:
        return
    path = Path(args.save_debug_train_data.format(rollout_id=rollout_id, rank=dist.get_rank()))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": dist.get_rank(),
        "samples": sorted((s for rows, _ in gathered for s in rows), key=lambda s: s["rollout_position"]),
        "dp_shards": [shard for _, shard in gathered],
        "raw_reward": data.get("raw_reward"),
    }
    torch.save(content, path)
    logger.info("wrote %d training samples to %s", len(content["samples"]), path)


def _local_samples(data: dict[str, Any]) -> list[dict[str, Any]]:
    count = len(data["tokens"])
    positions = data.get("partition") or range(count)
    samples: list[dict[str, Any]] = [
        {"rollout_position": int(p), "data_parallel_rank": mpu.get_data_parallel_rank()} for p in positions
    ]
    if data.get("sample_indices") is not None:
        for sample, index in zip(samples, data["sample_indices"], strict=True):
            sample["sample_index"] = index
    for key in _WHOLE_KEYS:
        if data.get(key) is not None:
            for sample, value in zip(samples, data[key], strict=True):
                sample[key] = value.cpu() if torch.is_tensor(value) else value
    for key in _SLICED_KEYS:
        if data.get(key):
            lengths = zip(data[key], data["total_lengths"], data["response_lengths"], strict=True)
            for sample, (value, total, response) in zip(samples, lengths, strict=True):
                sample[key] = all_gather_with_cp(value, total, response).detach().cpu()
    return samples
