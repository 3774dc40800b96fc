"""What one rollout means to the trainer: log-prob passes, advantages, optimizer steps, metrics.

Everything here runs on every rank of the training grid at the same time; process set-up is in `actor`.
"""

import logging
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import mpu

from slime.backends.megatron_utils.checkpoint import find_source, load_checkpoint
from slime.backends.megatron_utils.data import DataIterator, make_data_iterators, prepare_rollout_data
from slime.backends.megatron_utils.debug_dump import save_train_data
from slime.backends.megatron_utils.initialize import is_megatron_main_rank
from slime.backends.megatron_utils.loss import compute_advantages_and_returns, get_log_probs_and_entropy
from slime.backends.megatron_utils.model import TrainState, forward_only, train_one_step
from slime.backends.megatron_utils.tensor_backuper import TensorBackuper
from slime.backends.megatron_utils.train_metrics import (
    PhaseTimes,
    mean_over_steps,
    performance_metrics,
    rollout_metrics,
)
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)


def log_probs_reusable(args: Namespace, num_steps: int) -> bool:
    """True when the old policy of the loss is the current one, so that training computes the old log-probs anyway.

    That needs a single optimizer step for the rollout, and nothing else that reads the log-probs before it.
    """
    return (
        num_steps == 1
        and args.loss_type == "policy_loss"
        and args.kl_coef == 0
        and args.advantage_estimator != "gspo"
        and not (
            args.use_rollout_logprobs
            or args.get_mismatch_metrics
            or args.keep_old_actor
            or args.use_opd
            or args.custom_advantage_function_path
        )
    )


def optimizer_steps(
    args: Namespace, state: TrainState, rollout_id: int, data: dict[str, Any]
) -> list[dict[str, float]]:
    """All optimizer steps on one rollout's prepared data; the metrics of each (see `train_one_step`)."""
    iterators = make_data_iterators(data)
    steps = []
    for step_id, (count, batch_size) in enumerate(
        zip(data["num_microbatches"], data["global_batch_sizes"], strict=True)
    ):
        step = train_one_step(args, state, iterators, count, batch_size, rollout_id, step_id)
        logger.debug("rollout %d step %d: %s", rollout_id, step_id, {k: round(v, 6) for k, v in step.items()})
        steps.append(step)
        if args.overlap_param_gather and step_id == 0:
            for chunk in state.model:  # from here on the next forward gathers the updated weights
                chunk.enable_forward_pre_hook()
    if args.overlap_param_gather:
        for chunk in state.model:
            chunk.disable_forward_pre_hook(param_sync=True)
    return steps


class TrainerCore:
    """The actor's weights and what is done to them in a rollout.

    `backuper` holds "ref" (if there is a reference model) and "actor" while other weights are live.
    """

    def __init__(self, args: Namespace, state: TrainState, device: torch.device, times: PhaseTimes) -> None:
        self.args = args
        self.state = state
        self.device = device
        self.times = times
        self.backuper = TensorBackuper(self._named_weights, pin=device.type == "cuda")
        self._idle_since = time.perf_counter()

    def load_reference(self) -> None:
        """Keep --ref-load (default: the HF checkpoint) as "ref"; the actor's weights are live again afterwards."""
        args = self.args
        source = find_source(args.ref_load, args.ref_ckpt_step) or find_source(args.hf_checkpoint)
        if source is None:
            raise ValueError(
                f"--ref-load {args.ref_load}: neither latest_checkpointed_iteration.txt (Megatron) nor "
                "config.json (HF) there"
            )
        logger.info("loading the reference model from %s checkpoint %s", source.kind, source.path)
        self.backuper.backup("actor")
        load_checkpoint(args, TrainState(self.state.model, None, None), source)
        self.backuper.backup("ref")
        self.backuper.restore("actor")

    def train(
        self, rollout_id: int, rollout_data: dict[str, Any], critic_data: dict[str, list[np.ndarray]] | None = None
    ) -> dict[str, float] | None:
        """Train on this rank's share of a rollout. Metrics on the main rank, None elsewhere.

        critic_data: `values` of the critic on the same rank (see `CriticCore`), which has the same layout.
        """
        args = self.args
        if self.state.optimizer is None:
            raise ValueError(
                "this trainer has no optimizer: --num-rollout (times the batch sizes) gives no training step"
            )
        self.times.add("train_wait", time.perf_counter() - self._idle_since)
        with self.times("data_preprocess"):
            data = prepare_rollout_data(args, rollout_data, self.device)
            for key, column in (critic_data or {}).items():
                flat = torch.from_numpy(np.concatenate(column)).to(self.device)
                data[key] = list(flat.split([len(value) for value in column]))
        with self.times("train"):
            if args.compute_advantages_and_returns:
                self._score(data)
            if args.rollout_data_postprocess_path:
                load_function(args.rollout_data_postprocess_path)(args, rollout_id, data)
            metrics: dict[str, float] = {}
            if mpu.is_pipeline_last_stage(ignore_virtual=True) and mpu.get_tensor_model_parallel_rank() == 0:
                metrics |= rollout_metrics(args, data)
            with self.times("actor_train"):
                metrics |= mean_over_steps(optimizer_steps(args, self.state, rollout_id, data))
            if args.save_debug_train_data:
                save_train_data(args, rollout_id, data)
            self._update_reference(rollout_id)
        self._idle_since = time.perf_counter()
        seconds = self.times.take()
        if not is_megatron_main_rank():
            return None
        all_lengths = rollout_data["total_lengths"]
        response_tokens = round(metrics["rollout/response_lengths"] * len(all_lengths))
        device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        return metrics | performance_metrics(args, seconds, all_lengths, response_tokens, device_name)

    def _score(self, data: dict[str, Any]) -> None:
        """Add ref_log_probs, log_probs (unless training computes them anyway), advantages and returns."""
        args = self.args
        iterators = make_data_iterators(data)
        if "ref" in self.backuper.tags:
            self.backuper.backup("actor")
            self.backuper.restore("ref")
            with self.times("ref_log_probs"):
                data |= self._log_probs(data, iterators, "ref_")
            self.backuper.restore("actor")
        rollout_log_probs_suffice = args.use_rollout_logprobs and not args.get_mismatch_metrics
        if not rollout_log_probs_suffice and not log_probs_reusable(args, len(data["num_microbatches"])):
            with self.times("log_probs"):
                data |= self._log_probs(data, iterators, "")
        compute_advantages_and_returns(args, data)

    def _log_probs(self, data: dict[str, Any], iterators: list[DataIterator], prefix: str) -> dict[str, Any]:
        for iterator in iterators:
            iterator.reset()
        model = self.state.model
        return forward_only(get_log_probs_and_entropy, self.args, model, iterators, data["num_microbatches"], prefix)

    def _update_reference(self, rollout_id: int) -> None:
        interval = self.args.ref_update_interval
        if interval and (rollout_id + 1) % interval == 0:
            with self.times("ref_model_update"):
                self.backuper.backup("ref")

    def _named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and routing biases of all model chunks of this rank."""
        for index, chunk in enumerate(self.state.model):
            for name, parameter in chunk.named_parameters():
                yield f"{index}.{name}", parameter.data
            for name, buffer in chunk.named_buffers():
                if name.endswith("expert_bias"):
                    yield f"{index}.{name}", buffer
