"""One training rank as a plain object: sets the process up, then trains, saves and pushes weights when told.

Knows nothing of Ray. Megatron is imported in the constructor, after the accelerator has adapted the process to it.
"""

import contextlib
import logging
import re
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.distributed as dist

from slime.utils.accelerator import get_accelerator
from slime.utils.engine_client import EngineInfo

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """The trainer on one rank. All methods are collective: every rank calls them in the same order.

    args: the driver's namespace, or for the role "critic" the critic_args in it. init_method: "tcp://host:port" of
    rank 0; may be left out when this process is in a default process group already (it is then used and left alone at
    `close`). with_ref: also keep a reference model.

    Attributes: start_rollout_id, the first rollout to train; parallel_config, what the schedule of micro-batches
    needs to know; dp_rank; is_main_rank, whether this rank returns metrics. A critic's are called
    train/critic-<name> and perf/critic-<name>.
    """

    def __init__(
        self,
        args: Namespace,
        role: str = "actor",
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        with_ref: bool = False,
        init_method: str | None = None,
    ) -> None:
        if role not in ("actor", "critic") or (role == "critic") != (args.loss_type == "value_loss"):
            raise ValueError(
                f"role {role!r} with loss_type {args.loss_type!r}: a critic, and it alone, has value_loss"
            )
        self._role = role
        self._accelerator = get_accelerator(args.accelerator)
        self._accelerator.prepare_trainer()
        self._accelerator.set_device(local_rank)
        if init_method is None and not dist.is_initialized():
            raise ValueError("init_method is needed: this process is in no process group yet")

        from slime.backends.megatron_utils import initialize, packed_rope, torch_te
        from slime.backends.megatron_utils.arguments import build_megatron_args

        torch_te.install()
        packed_rope.install()
        self._memory_saver = _preloaded_memory_saver() if args.offload_train else None
        self.args = build_megatron_args(args, rank, world_size)
        self._owns_group = initialize.initialize_distributed(
            self.args, self._accelerator.distributed_backend, init_method or ""
        )
        initialize.initialize_megatron(self.args)
        self._build(with_ref, local_rank)
        self._updater: Any = None
        self._asleep = False
        if self.args.offload_train:
            self.sleep()

    def _build(self, with_ref: bool, local_rank: int) -> None:
        from megatron.core import mpu

        from slime.backends.megatron_utils.checkpoint import load_checkpoint, resolve_load
        from slime.backends.megatron_utils.critic import CriticCore
        from slime.backends.megatron_utils.initialize import is_megatron_main_rank
        from slime.backends.megatron_utils.model import setup_model_and_optimizer
        from slime.backends.megatron_utils.train_metrics import PhaseTimes
        from slime.backends.megatron_utils.trainer_core import TrainerCore

        source = resolve_load(self.args)
        self._state = setup_model_and_optimizer(self.args)
        self.start_rollout_id = load_checkpoint(self.args, self._state, source)
        self._times = PhaseTimes(self._accelerator.synchronize)
        core = CriticCore if self._role == "critic" else TrainerCore
        self._core: Any = core(self.args, self._state, self._accelerator.device(local_rank), self._times)
        if with_ref:
            self._core.load_reference()
        self.dp_rank = mpu.get_data_parallel_rank()
        self.is_main_rank = is_megatron_main_rank()
        virtual = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
        self.parallel_config = {
            "dp_size": mpu.get_data_parallel_world_size(),
            "cp_size": mpu.get_context_parallel_world_size(),
            "vpp_size": virtual,
            "microbatch_group_size_per_vp_stage": (
                self.args.microbatch_group_size_per_vp_stage or self.args.pipeline_model_parallel_size
                if virtual > 1
                else 1
            ),
        }

    def train(
        self, rollout_id: int, rollout_data: dict[str, Any], critic_data: dict[str, Any] | None = None
    ) -> dict[str, float] | None:
        """Train on this data-parallel rank's share of a rollout; metrics on the main rank, None elsewhere.

        critic_data: what the critic's `values` gave on the same rank; an actor with a critic needs it.
        """
        with self._awake():
            if self._role == "actor":
                return self._core.train(rollout_id, rollout_data, critic_data)
            metrics = self._core.train(rollout_id, rollout_data)
        return metrics and of_critic(metrics)

    def values(self) -> dict[str, list[np.ndarray]]:
        """The critic's values of the rollout it trained on last, as they were before: see `CriticCore`."""
        return self._core.values

    def save_model(self, rollout_id: int, force_sync: bool = False) -> dict[str, float] | None:
        """Save to --save (Megatron format) and --save-hf, whichever are given. Saving is synchronous in any case."""
        from slime.backends.megatron_utils.checkpoint import save_checkpoint
        from slime.backends.megatron_utils.hf_checkpoint import save_hf_checkpoint

        start = time.perf_counter()
        with self._awake():
            if self.args.save:
                save_checkpoint(self.args, self._state, rollout_id)
            if self.args.save_hf:
                save_hf_checkpoint(self.args, self._state.model, self.args.save_hf.format(rollout_id=rollout_id))
        return self._main({"perf/save_model_time": time.perf_counter() - start})

    def connect_engines(self, engines: list[EngineInfo]) -> None:
        """Tell the weight push which engines there are. Call again when they change."""
        from slime.backends.megatron_utils.update_weight import choose_updater

        if self._updater is None:
            self._updater = choose_updater(self.args, self._state.model)
        self._updater.connect(engines)

    def update_weights(self) -> dict[str, float] | None:
        """Push the current weights to the connected engines; metrics on the main rank."""
        if self._updater is None:
            raise RuntimeError("update_weights was called before connect_engines")
        start = time.perf_counter()
        with self._awake(), self._unmanaged_memory():
            metrics = self._updater.update_weights()
        return self._main({**(metrics or {}), "perf/update_weights_time": time.perf_counter() - start})

    def clear_memory(self) -> None:
        """Return cached device memory."""
        self._accelerator.empty_cache()

    def sleep(self) -> None:
        """Free the device memory of weights, gradients and optimizer (kept on the host). Needs --offload-train."""
        if not self.args.offload_train:
            raise ValueError(
                "sleep needs --offload-train: the memory saver must be in charge from the process's start"
            )
        if self._asleep:
            return
        start = time.perf_counter()
        self._accelerator.synchronize()
        self._accelerator.empty_cache()
        dist.barrier()
        self._memory_saver.pause()
        self._asleep = True
        logger.info("trainer asleep: %s", self._accelerator.memory())
        self._times.add("sleep", time.perf_counter() - start)

    def wake_up(self) -> None:
        """Undo `sleep`."""
        if not self._asleep:
            return
        start = time.perf_counter()
        self._memory_saver.resume()
        self._accelerator.synchronize()
        dist.barrier()
        self._asleep = False
        logger.info("trainer awake: %s", self._accelerator.memory())
        self._times.add("wake_up", time.perf_counter() - start)

    def close(self) -> None:
        """Leave Megatron and, if the constructor joined it, the default process group."""
        from slime.backends.megatron_utils.initialize import shutdown_megatron

        shutdown_megatron()
        if self._owns_group:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """Awake inside; with --offload-train asleep again afterwards, unless an error is on its way out."""
        self.wake_up()
        yield
        if self.args.offload_train:
            self.sleep()

    @contextlib.contextmanager
    def _unmanaged_memory(self) -> Iterator[None]:
        """Temporary buffers of the weight push must not belong to the memory saver: engines map them by address."""
        if not self.args.offload_train:
            yield
            return
        with self._memory_saver.disable():
            yield

    def _main(self, metrics: dict[str, float]) -> dict[str, float] | None:
        if not self.is_main_rank:
            return None
        return of_critic(metrics) if self._role == "critic" else metrics


def of_critic(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics under the names they have for a critic: beside an actor's, train/x is train/critic-x."""
    return {re.sub("^(train|perf)/", r"\1/critic-", name): value for name, value in metrics.items()}


def _preloaded_memory_saver() -> Any:
    """The memory saver whose library was preloaded into this process.

    megatron-core 0.19.2 sets the saver's other mode when it is imported; it must be set back before the first use.
    """
    import megatron.core.inference.contexts.dynamic_context  # noqa: F401  the module that sets it, so that it is done
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "preload"
    # Pinned host memory is slow to get: half a second a GB, at each sleep, unless it is kept.
    torch_memory_saver.retain_cpu_backup = True
    return torch_memory_saver
