"""The driver's view of the rollout manager: plain blocking calls, each of which names what is waited for."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from slime.ray.engine_pool import SUPERVISED
from slime.ray.placement import Placement
from slime.ray.rollout import RolloutBatch, RolloutManager
from slime.ray.utils import add_default_ray_env_vars, wait_for
from slime.utils.engine_client import EngineError, EngineInfo

NAME = "rollout manager"
QUICK_S = 900.0
DISPOSE_TIMEOUT_S = 60.0


class RolloutClient:
    """Starts the manager and, right behind it, its engines. A failure of either shows in the first call that waits."""

    def __init__(self, args: Namespace, placement: Placement, manager_cls: type = RolloutManager) -> None:
        environment = {"env_vars": add_default_ray_env_vars(args.accelerator, SUPERVISED)}
        self._actor = (
            ray.remote(manager_cls).options(num_cpus=1, num_gpus=0, runtime_env=environment).remote(args, placement)
        )
        self._prepared = self._actor.prepare.remote()
        # Calls run in order: this one must not queue behind the start of the engines.
        self._per_epoch = None if args.num_rollout is not None else self._actor.get_num_rollout_per_epoch.remote()
        self._started = self._actor.start.remote()

    def starting(self) -> dict[str, ray.ObjectRef]:
        """What resolves once the engines generate, by name, to be waited for together with other things."""
        return {NAME: self._prepared, "engines": self._started}

    def wait_until_started(self) -> None:
        """Returns once the engines generate."""
        wait_for(self.starting(), "starting engines")

    def get_num_rollout_per_epoch(self) -> int | None:
        """Rollouts in one pass over the data; None if --num-rollout fixes their number."""
        if self._per_epoch is None:
            return None
        wait_for({NAME: self._prepared}, "load the prompt data")
        return wait_for({NAME: self._per_epoch}, "load the prompt data")[NAME]

    def generate(self, rollout_id: int) -> RolloutBatch:
        """One rollout. Its own time limits are the rollout function's and the death of an engine."""
        return self._call("generate", rollout_id, doing=f"generate rollout {rollout_id}", timeout=None)

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Metrics of one evaluation."""
        return self._call("eval", rollout_id, doing=f"evaluate at rollout {rollout_id}", timeout=None)

    def engines(self) -> list[EngineInfo]:
        """The engines that receive weights."""
        return self._call("engines", doing="list the engines")

    def set_train_parallel_config(self, parallel_config: dict[str, int]) -> None:
        """How train data is split over the trainer's ranks."""
        self._call("set_train_parallel_config", parallel_config, doing="pass on the trainer's layout")

    def save(self, rollout_id: int) -> None:
        """Stores where the data source stands."""
        self._call("save", rollout_id, doing=f"save the data source after rollout {rollout_id}")

    def load(self, rollout_id: int) -> None:
        """The data source continues after `rollout_id`."""
        self._call("load", rollout_id, doing=f"load the data source of rollout {rollout_id}")

    def offload(self) -> None:
        """Engines give their device memory back."""
        self._call("offload", doing="engines release memory")

    def onload_weights(self) -> None:
        """Engines take memory for weights."""
        self._call("onload_weights", doing="engines take memory for weights")

    def onload_kv(self) -> None:
        """Engines take memory for their cache."""
        self._call("onload_kv", doing="engines take memory for their cache")

    @contextmanager
    def explaining_failures(self) -> Iterator[None]:
        """A trainer's request that fails inside because its engine is dying raises the engine's own story instead."""
        try:
            yield
        except EngineError as error:
            try:
                self._call("look_for_dead_engine", doing="see why an engine does not answer")
            except EngineError as dead:
                raise dead from error
            raise

    def dispose(self) -> None:
        """Stops engines, router and manager."""
        self._call("dispose", doing="stop the engines", timeout=DISPOSE_TIMEOUT_S)
        ray.kill(self._actor)

    def _call(self, method: str, *arguments: Any, doing: str, timeout: float | None = QUICK_S) -> Any:
        return wait_for({NAME: getattr(self._actor, method).remote(*arguments)}, doing, timeout)[NAME]
