"""Rollout data on the training device, and micro-batches packed for Megatron (thd layout, zigzag context parallelism).

Knows nothing of losses: it turns per-sample lists into one packed row and says where each sample begins.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp, slice_with_cp

PAD_TOKEN_ID = 0

# Per-sample keys a training micro-batch carries when the rollout data has them.
TRAIN_KEYS = (
    "tokens",
    "total_lengths",
    "response_lengths",
    "loss_masks",
    "rollout_mask_sums",
    "sample_indices",
    "log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "values",
    "advantages",
    "returns",
    "opd_reverse_kl",
    "multimodal_train_inputs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)
# What a forward-only pass needs.
FORWARD_KEYS = (
    "tokens",
    "total_lengths",
    "response_lengths",
    "multimodal_train_inputs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)


def prepare_rollout_data(args: Namespace, rollout_data: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """One data-parallel rank's rollout, moved to `device`; the input is not changed.

    tokens: list of int64 [total_length]; loss_masks: list of int32 [response_length]; rollout_mask_sums: float32
    [samples]; rollout_log_probs, teacher_log_probs: lists of float32, cut to this context-parallel rank's zigzag
    slice. `total_lengths` arrives for the whole batch and leaves for this rank's samples, `raw_reward` likewise (as
    `local_raw_reward`).

    Raises ValueError naming the sample when lengths disagree.
    """
    data = dict(rollout_data)
    partition = data.get("partition")
    count = len(data["tokens"])
    for whole, local in (("total_lengths", "total_lengths"), ("raw_reward", "local_raw_reward")):
        if whole in data:
            values = data[whole]
            data[local] = list(values) if partition is None else [values[i] for i in partition]
    data["tokens"] = _to_device(data["tokens"], torch.int64, device)
    data["loss_masks"] = _to_device(data["loss_masks"], torch.int32, device)
    _check_lengths(data, count)

    if data.get("rollout_mask_sums") is not None:
        data["rollout_mask_sums"] = torch.as_tensor(data["rollout_mask_sums"], dtype=torch.float32).to(device)
    for key in ("rollout_log_probs", "teacher_log_probs"):
        if data.get(key) is not None:
            full = _to_device(data[key], torch.float32, device)
            data[key] = [
                slice_log_prob_with_cp(x, n, m)
                for x, n, m in zip(full, data["total_lengths"], data["response_lengths"], strict=True)
            ]
    if data.get("multimodal_train_inputs") is not None:
        data["multimodal_train_inputs"] = [
            None if inputs is None else {k: torch.as_tensor(v).to(device) for k, v in inputs.items()}
            for inputs in data["multimodal_train_inputs"]
        ]
    return data


class DataIterator:
    """Micro-batches of one rank's rollout data, in schedule order. Every virtual pipeline stage has its own."""

    def __init__(self, rollout_data: dict[str, Any], micro_batch_indices: Sequence[Sequence[int]]) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self._next = 0

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        """Per key the values of the next micro-batch's samples (None where the data lacks the key)."""
        self._next += 1
        return self._columns(keys, self.micro_batch_indices[self._next - 1])

    def peek(self, keys: Sequence[str], count: int) -> dict[str, Any]:
        """Per key the values of all samples of the next `count` micro-batches; the iterator stays where it is."""
        batches = self.micro_batch_indices[self._next : self._next + count]
        return self._columns(keys, [index for indices in batches for index in indices])

    def reset(self) -> None:
        self._next = 0

    def _columns(self, keys: Sequence[str], indices: Sequence[int]) -> dict[str, Any]:
        columns = {key: self.rollout_data.get(key) for key in keys}
        return {key: None if column is None else [column[i] for i in indices] for key, column in columns.items()}


def make_data_iterators(rollout_data: dict[str, Any]) -> list[DataIterator]:
    """One iterator a virtual pipeline stage (a single one without virtual stages)."""
    stages = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    return [DataIterator(rollout_data, rollout_data["micro_batch_indices"]) for _ in range(stages)]


def get_batch(iterator: DataIterator, keys: Sequence[str], pad_multiplier: int) -> dict[str, Any]:
    """The next micro-batch, packed.

    Adds to the per-sample lists: `tokens` int64 [1, T], this context-parallel rank's part of every sample, one after
    the other, padded at the end to a multiple of tp * pad_multiplier with token 0; `unconcat_tokens`, the whole
    samples; `packed_seq_params` with cu_seqlens in global lengths (int32 [samples + 1], one more when there is a
    tail, which is a sequence of its own); `model_kwargs`, what else the model's forward takes (multimodal inputs).
    """
    batch = iterator.get_next(keys)
    cp, tp = mpu.get_context_parallel_world_size(), mpu.get_tensor_model_parallel_world_size()
    samples = batch["tokens"]
    parts = samples if cp == 1 else [slice_with_cp(x, PAD_TOKEN_ID) for x in samples]
    lengths = [part.numel() for part in parts]
    tokens = torch.cat(parts)

    unit = tp * pad_multiplier
    if cp > 1 and unit % 2:
        unit *= 2  # a zigzag rank holds two equal chunks of every sequence, the tail included
    tail = -tokens.numel() % unit
    if tail:
        tokens = F.pad(tokens, (0, tail), value=PAD_TOKEN_ID)
        lengths.append(tail)

    batch["unconcat_tokens"] = samples
    batch["tokens"] = tokens.unsqueeze(0)
    batch["packed_seq_params"] = packed_seq_params([n * cp for n in lengths], tokens.device)
    batch["model_kwargs"] = _merge_multimodal(batch.pop("multimodal_train_inputs", None))
    return batch


def packed_seq_params(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Megatron's description of a packed row of sequences with these (global) lengths."""
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, dtype=torch.int32, out=cu_seqlens[1:])
    cu_seqlens = cu_seqlens.to(device, non_blocking=True)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _to_device(columns: Sequence[Any], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Many small sequences to the device in one transfer, as views of one buffer."""
    tensors = [torch.as_tensor(x, dtype=dtype) for x in columns]
    if not tensors:
        return []
    return list(torch.cat(tensors).to(device, non_blocking=True).split([len(x) for x in tensors]))


def _check_lengths(data: dict[str, Any], count: int) -> None:
    indices = data.get("sample_indices") or range(count)
    rows = (data["tokens"], data["total_lengths"], data["loss_masks"], data["response_lengths"])
    for index, tokens, total, mask, response in zip(indices, *rows, strict=True):
        if len(tokens) != total or len(mask) != response or not 0 <= response < total:
            raise ValueError(
                f"sample {index}: {len(tokens)} tokens, total_length {total}, response_length {response}, loss mask "
                f"of {len(mask)}; tokens must equal total_length, the mask response_length, and 0 <= response < total"
            )


def _merge_multimodal(inputs: list[dict[str, torch.Tensor] | None] | None) -> dict[str, torch.Tensor]:
    """Per-sample dicts of tensors to one dict, values concatenated on dim 0."""
    merged: dict[str, list[torch.Tensor]] = {}
    for sample in inputs or []:
        for key, value in (sample or {}).items():
            merged.setdefault(key, []).append(value)
    return {key: torch.cat(values) for key, values in merged.items()}
