"""One trainer rank as a Ray actor: sets up the process, then hands every call to the trainer."""

import logging
import os
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import ray

from slime.observability.logging_utils import configure_logging
from slime.observability.quiet import quieten_trainer
from slime.ray.ports import get_master_addr_and_port
from slime.ray.utils import Box, local_device_index
from slime.utils.engine_client import EngineInfo

logger = logging.getLogger(__name__)

# Values a trainer on CUDA has unless the surrounding environment chose others.
CUDA_DEFAULTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron insists on it with tensor or context parallelism
    "NCCL_CUMEM_ENABLE": "0",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
}


@dataclass(frozen=True)
class TrainerReport:
    """What a rank knows once it has started.

    parallel_config: dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage.
    """

    start_rollout_id: int
    parallel_config: dict[str, int]


class TrainRayActor:
    """The process of one rank. Ray runs its calls one after the other, on the main thread."""

    def __init__(self, rank: int, world_size: int, device_id: int | str, accelerator: str) -> None:
        """device_id: physical GPU of this rank; on the CPU, the number of this rank's slot on its node."""
        configure_logging()
        self._rank = rank
        self._world_size = world_size
        self._local_rank = (
            int(device_id)
            if accelerator == "cpu"
            else local_device_index(device_id, os.environ.get("CUDA_VISIBLE_DEVICES"))
        )
        self._trainer: Any = None
        if accelerator == "cuda":
            for name, value in CUDA_DEFAULTS.items():
                os.environ.setdefault(name, value)

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Where the ranks can meet, if this one is rank 0."""
        return get_master_addr_and_port()

    def init(self, args: Namespace, role: str, with_ref: bool, master_addr: str, master_port: int) -> TrainerReport:
        """Builds the trainer: process group, model, optimizer, checkpoint."""
        os.environ |= {
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
            "WORLD_SIZE": str(self._world_size),
            "RANK": str(self._rank),
            "LOCAL_RANK": str(self._local_rank),
        }
        quieten_trainer(args.accelerator)
        # Imported here: the driver imports this module to create actors and must stay free of torch and Megatron.
        from slime.backends.megatron_utils.actor import MegatronTrainer

        self._trainer = MegatronTrainer(
            args,
            role=role,
            rank=self._rank,
            world_size=self._world_size,
            local_rank=self._local_rank,
            with_ref=with_ref,
            init_method=f"tcp://{master_addr}:{master_port}",
        )
        return TrainerReport(self._trainer.start_rollout_id, self._trainer.parallel_config)

    def train(
        self, rollout_id: int, data_refs: list[Box], critic_data: dict[str, Any] | None = None
    ) -> dict[str, float] | None:
        """Trains on this rank's share of the rollout; metrics on the main rank, None elsewhere.

        critic_data: the `values` of the same rank of the critic.
        """
        return self._trainer.train(rollout_id, ray.get(data_refs[self._trainer.dp_rank].inner), critic_data)

    def values(self) -> dict[str, Any]:
        """A critic's values of the rollout it trained on last, from before."""
        return self._trainer.values()

    def save_model(self, rollout_id: int, force_sync: bool = False) -> dict[str, float] | None:
        """Collective; metrics on the main rank."""
        return self._trainer.save_model(rollout_id, force_sync=force_sync)

    def connect_engines(self, engines: list[EngineInfo]) -> None:
        """Collective."""
        self._trainer.connect_engines(engines)

    def update_weights(self) -> dict[str, float] | None:
        """Collective; metrics on the main rank."""
        return self._trainer.update_weights()

    def clear_memory(self) -> None:
        """Gives cached device memory back."""
        self._trainer.clear_memory()

    def sleep(self) -> None:
        """Moves everything off the device."""
        self._trainer.sleep()

    def wake_up(self) -> None:
        """Undoes sleep."""
        self._trainer.wake_up()

    def close(self) -> None:
        """Collective: finishes checkpoints being written, leaves the process groups."""
        self._trainer.close()
