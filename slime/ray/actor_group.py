"""The trainer ranks as one object: start them, and tell all of them the same thing at once."""

import importlib.util
import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from slime.ray.placement import Placement
from slime.ray.train_actor import TrainerReport, TrainRayActor
from slime.ray.utils import Box, add_default_ray_env_vars, merge_metrics, wait_for
from slime.utils.engine_client import EngineInfo

logger = logging.getLogger(__name__)

NUM_GPUS_PER_ACTOR = 0.4  # the rest of the slot is for the engine that shares it
START_TIMEOUT_S = 3600.0
# A rank that is stuck in a collective is reported by the collective's own, shorter time-out; this one is for the rest.
CALL_TIMEOUT_S = 24 * 3600.0


class RayTrainGroup:
    """One Ray actor a rank, rank r on slot r of the placement. Without slots (nothing is trained) calls do nothing.

    parallel_config: how the ranks are laid out (dp_size, cp_size, ...), known once they have started.
    """

    def __init__(
        self,
        args: Namespace,
        placement: Placement,
        num_gpus_per_actor: float = NUM_GPUS_PER_ACTOR,
        role: str = "actor",
        with_ref: bool = False,
        actor_cls: type = TrainRayActor,
    ) -> None:
        self.args = args
        self.role = role
        self.parallel_config: dict[str, int] | None = None
        self._placement = placement
        self._num_gpus_per_actor = num_gpus_per_actor
        self._with_ref = with_ref
        self._actor_cls = actor_cls
        self._actors: list[Any] = []
        self._has_engines = False

    def start(self) -> dict[str, ray.ObjectRef]:
        """Creates the ranks; their names and the references to wait for. `started` takes what those resolve to."""
        world_size = len(self._placement)
        self._actors = [self._create_actor(rank, world_size) for rank in range(world_size)]
        if not self._actors:
            return {}
        master = wait_for(
            {self._name(0): self._actors[0].get_master_addr_and_port.remote()}, "starting the trainer", START_TIMEOUT_S
        )
        address, port = master[self._name(0)]
        return self._call("init", self.args, self.role, self._with_ref, address, port)

    def started(self, reports: dict[str, Any]) -> int:
        """Takes the values of the references that `start` returned; the rollout id at which training starts.

        Raises RuntimeError if the ranks have loaded different checkpoints.
        """
        mine: dict[str, TrainerReport] = {name: reports[name] for name in map(self._name, range(len(self._actors)))}
        starts = {name: report.start_rollout_id for name, report in mine.items()}
        if len(set(starts.values())) > 1:
            raise RuntimeError(
                f"the {self.role}'s ranks loaded different checkpoints: start rollout ids {starts}; "
                "is --load on a shared disk?"
            )
        if not mine:
            return 0
        self.parallel_config = mine[self._name(0)].parallel_config
        return starts[self._name(0)]

    def connect_engines(self, engines: list[EngineInfo]) -> None:
        """Tells every rank where the engines listen. Without engines weights are not pushed."""
        self._has_engines = bool(engines)
        if engines:
            self._wait("connect_engines", engines, doing="connecting trainers to engines")

    def train(
        self, rollout_id: int, data_refs: list[Box], external_data: Sequence[ray.ObjectRef] | None = None
    ) -> dict[str, float]:
        """Trains on one rollout. Returns the metrics.

        data_refs: one box per data-parallel rank. external_data: what a critic's `values` returned, for the actor.
        """
        refs = self._start_training(rollout_id, data_refs, external_data)
        return merge_metrics(
            list(wait_for(refs, f"train {self.role} on rollout {rollout_id}", CALL_TIMEOUT_S).values())
        )

    def async_train(
        self, rollout_id: int, data_refs: list[Box], external_data: Sequence[ray.ObjectRef] | None = None
    ) -> list[ray.ObjectRef]:
        """Starts training on one rollout, as `train`; a reference per rank."""
        return list(self._start_training(rollout_id, data_refs, external_data).values())

    def values(self) -> list[ray.ObjectRef]:
        """The critic's values of the rollout it trained on last, from before: a reference per rank."""
        return list(self._call("values").values())

    def save_model(self, rollout_id: int, force_sync: bool = False) -> dict[str, float]:
        """Checkpoint of the model after `rollout_id`; metrics. force_sync: return only when it is on disk."""
        return self._wait("save_model", rollout_id, force_sync, doing=f"save after rollout {rollout_id}")

    def update_weights(self) -> dict[str, float]:
        """Pushes the weights to the engines; metrics of the push."""
        return self._wait("update_weights", doing="push weights to the engines") if self._has_engines else {}

    def clear_memory(self) -> None:
        """Gives cached device memory back."""
        self._wait("clear_memory", doing="clear trainer memory")

    def offload(self) -> None:
        """Moves the trainer's tensors off the device."""
        self._wait("sleep", doing="move trainers off their GPUs")

    def onload(self) -> None:
        """Brings the trainer's tensors back."""
        self._wait("wake_up", doing="move trainers onto their GPUs")

    def close(self) -> None:
        """Ends the ranks in order: finishes what they are writing and leaves their process groups."""
        self._wait("close", doing="end the trainers")

    def _start_training(
        self, rollout_id: int, data_refs: list[Box], external_data: Sequence[ray.ObjectRef] | None
    ) -> dict[str, ray.ObjectRef]:
        if external_data is None:
            return self._call("train", rollout_id, data_refs)
        ranks = zip(self._actors, external_data, strict=True)
        return {
            self._name(rank): actor.train.remote(rollout_id, data_refs, data)
            for rank, (actor, data) in enumerate(ranks)
        }

    def _wait(self, method: str, *arguments: Any, doing: str) -> dict[str, float]:
        return merge_metrics(list(wait_for(self._call(method, *arguments), doing, CALL_TIMEOUT_S).values()))

    def _call(self, method: str, *arguments: Any) -> dict[str, ray.ObjectRef]:
        return {self._name(rank): getattr(actor, method).remote(*arguments) for rank, actor in enumerate(self._actors)}

    def _create_actor(self, rank: int, world_size: int) -> Any:
        devices = {"num_gpus": self._num_gpus_per_actor} if self.args.accelerator == "cuda" else {}
        return (
            ray.remote(self._actor_cls)
            .options(
                name=None,
                num_cpus=self._num_gpus_per_actor,
                scheduling_strategy=self._placement.strategy(rank),
                runtime_env={"env_vars": trainer_env(self.args)},
                **devices,
            )
            .remote(rank, world_size, self._placement.gpu_ids[rank], self.args.accelerator)
        )

    def _name(self, rank: int) -> str:
        return f"{'critic' if self.role == 'critic' else 'trainer'} rank {rank}"


def trainer_env(args: Namespace) -> dict[str, str]:
    """What a trainer process needs in its environment before it starts; --train-env-vars win."""
    env_vars: dict[str, str] = {}
    if args.offload_train:
        env_vars |= {
            "LD_PRELOAD": str(memory_saver_library()),
            "TMS_INIT_ENABLE": "1",
            "TMS_INIT_ENABLE_CPU_BACKUP": "1",
        }
    given = {name: str(value) for name, value in (args.train_env_vars or {}).items()}
    return add_default_ray_env_vars(args.accelerator, env_vars | given)


def memory_saver_library(package_directory: Path | None = None) -> Path:
    """The torch_memory_saver library to preload into a trainer that moves off the GPU.

    It lies beside the package, in a build for CUDA 13, CUDA 12 or any. Raises FileNotFoundError if there is none.
    """
    if package_directory is None:
        spec = importlib.util.find_spec("torch_memory_saver")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("--offload-train needs the package torch_memory_saver, which is not installed")
        package_directory = Path(spec.origin).parent
    names = [f"torch_memory_saver_hook_mode_preload{build}.abi3.so" for build in ("_cu13", "_cu12", "")]
    for name in names:
        if (library := package_directory.parent / name).is_file():
            return library
    raise FileNotFoundError(f"--offload-train: none of {', '.join(names)} is in {package_directory.parent}")
