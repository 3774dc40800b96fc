"""What one rollout means to the critic: values for the actor, then returns to fit and optimizer steps on them.

The counterpart of `trainer_core` for the other role; process set-up is in `actor`.
"""

import time
from argparse import Namespace
from typing import Any

import numpy as np
import torch
from megatron.core import mpu

from slime.backends.megatron_utils.data import make_data_iterators, prepare_rollout_data
from slime.backends.megatron_utils.initialize import is_megatron_main_rank
from slime.backends.megatron_utils.loss import compute_advantages_and_returns, get_values
from slime.backends.megatron_utils.model import TrainState, forward_only
from slime.backends.megatron_utils.train_metrics import PhaseTimes, mean_over_steps, rollout_metrics
from slime.backends.megatron_utils.trainer_core import optimizer_steps


class CriticCore:
    """The critic's weights and what is done to them in a rollout.

    values: of the last rollout, from before the steps on it: {"values": [...]} with a float32 array [canonical length]
    for each sample of this rank, in order; {} except on the last pipeline stage. Arrays, because a tensor that is part
    of a larger one takes all of it along to another process.
    """

    def __init__(self, args: Namespace, state: TrainState, device: torch.device, times: PhaseTimes) -> None:
        self.args = args
        self.state = state
        self.device = device
        self.times = times
        self.values: dict[str, list[np.ndarray]] = {}
        self._idle_since = time.perf_counter()

    def train(self, rollout_id: int, rollout_data: dict[str, Any]) -> dict[str, float] | None:
        """Train on this rank's share of a rollout. Metrics on the main rank, None elsewhere.

        The targets are the returns of generalised advantage estimation with the values of the critic as it was, and
        with the rewards alone: a KL penalty of the actor's is no part of them.
        """
        args = self.args
        if self.state.optimizer is None:
            raise ValueError("this critic has no optimizer: --num-rollout (times the batch sizes) gives no step")
        self.times.add("train_wait", time.perf_counter() - self._idle_since)
        with self.times("data_preprocess"):
            data = prepare_rollout_data(args, rollout_data, self.device)
        with self.times("train"):
            iterators = make_data_iterators(data)
            with self.times("values"):
                found = forward_only(get_values, args, self.state.model, iterators, data["num_microbatches"])
                self.values = {key: _to_host(column) for key, column in found.items()}
            data |= found
            compute_advantages_and_returns(args, data)
            metrics: dict[str, float] = {}
            if mpu.is_pipeline_last_stage(ignore_virtual=True) and mpu.get_tensor_model_parallel_rank() == 0:
                metrics |= rollout_metrics(args, data)
            with self.times("critic_train"):
                metrics |= mean_over_steps(optimizer_steps(args, self.state, rollout_id, data))
        self._idle_since = time.perf_counter()
        seconds = self.times.take()
        if not is_megatron_main_rank():
            return None
        return metrics | {f"perf/{name}_time": value for name, value in seconds.items()}


def _to_host(column: list[torch.Tensor]) -> list[np.ndarray]:
    """All tensors in one transfer."""
    flat = torch.cat(column).cpu().numpy()
    return np.split(flat, np.cumsum([len(value) for value in column])[:-1])
