"""Numbers about one training pass: reductions over ranks, means over a rollout's tokens, phase times and speed."""

import contextlib
import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.backends.megatron_utils.indexer_loss import trains_indexers
from slime.utils.flops import ModelFlops, peak_tflops
from slime.utils.model_shape import ModelShape, ShapeError

logger = logging.getLogger(__name__)

# Per-token lists, in the context-parallel slice layout: averaged over the unmasked tokens of each rollout.
_TOKEN_KEYS = (
    "log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "opd_reverse_kl",
    "kl",
    "entropy",
    "ref_entropy",
    "values",
    "returns",
    "advantages",
)
# Per-sample numbers: plain means.
_SAMPLE_KEYS = ("rewards", "response_lengths", "total_lengths", "truncated", "round_number")


def reduce_step_metrics(
    losses: Sequence[dict[str, Any]], step_global_batch_size: int, per_token: bool
) -> dict[str, float]:
    """Loss metrics of one optimizer step from every micro-batch's `{"keys": [...], "values": tensor([n, *sums])}`.

    Sums over micro-batches and over data x context parallel ranks, divided by the number of rollouts of the step,
    or, with a per-token loss, by the number of tokens `n` (counted once on every context-parallel rank, hence the
    factor). Collective over the last pipeline stage.
    """
    values = torch.stack([loss["values"].detach().float() for loss in losses]).sum(0)
    dist.all_reduce(values, group=mpu.get_data_parallel_group(with_context_parallel=True))
    tokens, *sums = values.tolist()
    scale = mpu.get_context_parallel_world_size() / max(tokens, 1) if per_token else 1 / step_global_batch_size
    return {key: total * scale for key, total in zip(losses[0]["keys"], sums, strict=True)}


def rollout_metrics(args: Namespace, data: dict[str, Any]) -> dict[str, float]:
    """`rollout/<key>` means over the whole batch of what the trainer received and computed.

    Per-token lists: the mean over rollouts of each rollout's mean over its unmasked tokens. Per-sample lists: plain
    means. Collective over the data x context parallel ranks of a last pipeline stage.
    """
    local = {}
    reducer = get_sum_of_sample_mean(
        data["total_lengths"], data["response_lengths"], data["loss_masks"], data.get("rollout_mask_sums")
    )
    cp = mpu.get_context_parallel_world_size()
    for key in _TOKEN_KEYS:
        if data.get(key):
            # Every rollout has weight 1 over all ranks, however many samples it became.
            rollouts = sum(data["global_batch_sizes"]) / mpu.get_data_parallel_world_size()
            local[key] = (float(reducer(torch.cat([x.float() for x in data[key]]))) * cp, rollouts)
    for key in _SAMPLE_KEYS:
        if data.get(key) is not None:
            local[key] = (float(sum(data[key])), float(len(data[key])))
    if data.get("local_raw_reward") is not None and all(isinstance(r, int | float) for r in data["local_raw_reward"]):
        local["raw_reward"] = (float(sum(data["local_raw_reward"])), float(len(data["local_raw_reward"])))

    group = mpu.get_data_parallel_group_gloo(with_context_parallel=True)
    gathered: list[dict[str, tuple[float, float]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, local, group=group)
    metrics = {}
    for key in local:
        pairs = [part[key] for part in gathered if key in part]
        metrics[f"rollout/{key}"] = sum(total for total, _ in pairs) / max(sum(count for _, count in pairs), 1e-9)
    return metrics


def mean_over_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """`train/<key>` of a rollout: the mean over its optimizer steps; learning rates are those of the last step."""
    metrics = {}
    for key in steps[-1]:
        values = [step[key] for step in steps]
        metrics[f"train/{key}"] = values[-1] if key.startswith("lr-") else sum(values) / len(values)
    metrics["train/num_steps"] = float(len(steps))
    return metrics


class PhaseTimes:
    """Wall time of named phases since the last `take`, in seconds. A phase may run several times; times add up."""

    def __init__(self, synchronize: Any) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return taken


def performance_metrics(
    args: Namespace,
    seconds: dict[str, float],
    all_lengths: Sequence[int],
    response_tokens: int,
    device_name: str | None,
) -> dict[str, float]:
    """`perf/*` of one training pass: phase times (s), model TFLOP/s and tokens/s per device, share of its peak (MFU).

    all_lengths: total lengths of the whole batch, and response_tokens in it: only these pass the head. Operations are
    those the model needs (`ModelFlops`): recomputation takes time and counts nothing. device_name: None on a CPU; MFU
    is left out for a device whose peak is not known.
    """
    world_size = args.world_size
    metrics = {f"perf/{name}_time": value for name, value in seconds.items()}
    for name, flops in _pass_flops(args, all_lengths, response_tokens).items():
        if seconds.get(name):
            metrics[f"perf/{name}_tflops"] = flops / world_size / seconds[name] / 1e12
    peak = peak_tflops(device_name) if device_name else None
    if peak and "perf/actor_train_tflops" in metrics:
        metrics["perf/actor_train_mfu"] = metrics["perf/actor_train_tflops"] / peak
    if seconds.get("actor_train"):
        metrics["perf/actor_train_tok_per_s"] = sum(all_lengths) / world_size / seconds["actor_train"]
    if "train_wait" in seconds and "train" in seconds:
        metrics["perf/step_time"] = seconds["train_wait"] + seconds["train"]
        metrics["perf/wait_time_ratio"] = seconds["train_wait"] / metrics["perf/step_time"]
    return metrics


def _pass_flops(args: Namespace, all_lengths: Sequence[int], response_tokens: int) -> dict[str, int]:
    """Operations of each pass over the batch; none for a model whose arguments do not say what it is made of."""
    try:
        model = ModelFlops.of(ModelShape.from_args(args))
    except ShapeError as error:
        logger.info("no FLOPs are counted: %s", error)
        return {}
    depths = (args.mtp_num_layers or 0) if args.enable_mtp_training else 0
    forward = model.forward(all_lengths, response_tokens)
    return {
        "log_probs": forward,
        "ref_log_probs": forward,
        "actor_train": model.training(all_lengths, response_tokens, depths, trains_indexers(args)),
    }
