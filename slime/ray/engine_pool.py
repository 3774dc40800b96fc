"""All engines and their router: started side by side, watched, told to make room, stopped."""

import logging
import os
from argparse import Namespace
from typing import Any

import ray

from slime.backends.sglang_utils.router import Router
from slime.ray.engine import EngineSlot, SGLangEngine, by_name, plan_engines
from slime.ray.placement import Placement
from slime.ray.utils import add_default_ray_env_vars, wait_for
from slime.utils.engine_client import EngineError, EngineInfo

logger = logging.getLogger(__name__)

# Servers stand under a supervisor that ends their process tree when its owner is gone; Ray must not kill that first.
SUPERVISED = {"RAY_kill_child_processes_on_worker_exit": "0"}
ENGINE_SHARE = 0.2  # of a slot; the rest is for the trainer that shares it
ANSWER_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


class EnginePool:
    """Router and engines of one model. infos: the engines, once `start` has returned."""

    def __init__(self, args: Namespace, placement: Placement, engine_cls: type = SGLangEngine) -> None:
        """Starts the router and the actors of the engines; `start` starts the servers."""
        self.infos: list[EngineInfo] = []
        self._args = args
        self._slots = plan_engines(args, placement.gpu_ids, placement.nodes)
        self._actors = [self._create_actor(slot, placement, engine_cls) for slot in self._slots]
        self.router = Router(args, log_dir=args.log_dir, environ=os.environ, host=ray.util.get_node_ip_address())

    def start(self) -> None:
        """Starts all servers, waits until each generates, and tells the router.

        Raises what stopped the first of them: EngineError with the end of its log, TimeoutError naming who is missing.
        """
        addresses = self._meeting_points()
        starting = [
            actor.start.remote(addresses.get(slot.rank)) for slot, actor in zip(self._slots, self._actors, strict=True)
        ]
        # The engine's own time-out comes first and says more; this one is for an actor that does not come up at all.
        limit = self._args.engine_start_timeout + ANSWER_TIMEOUT_S
        answers = wait_for(by_name(self._slots, starting), "starting engines", limit)
        self.infos = [info for info in answers.values() if info is not None]
        self.router.wait_ready(self._args.engine_start_timeout)
        for info in self.infos:
            self.router.client.add_worker(info.url)
        logger.info("%d engines behind %s: %s", len(self.infos), self.router.url, [info.url for info in self.infos])

    def check(self) -> None:
        """Raises EngineError with the end of the log of the engine or router that has ended."""
        self.router.check_alive()
        try:
            self._tell("check", doing="check that the engines are alive", timeout=60.0)
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"an engine's actor died, and its server with it: {error}") from error

    def offload(self) -> None:
        """The engines give their device memory back."""
        self._tell("release_memory", doing="engines release memory")

    def onload(self, tags: list[str]) -> None:
        """The engines take the memory of `tags` again."""
        self._tell("resume_memory", tags, doing=f"engines resume {', '.join(tags)}")

    def stop(self) -> None:
        """Ends engines, then the router. What does not end in time is killed with its actor."""
        try:
            self._tell("stop", doing="stop engines", timeout=STOP_TIMEOUT_S)
        except (TimeoutError, EngineError, ray.exceptions.RayError) as error:
            logger.warning("engines did not stop in order and are killed: %s", error)
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._slots = [], []
        self.router.stop()

    def _tell(self, method: str, *arguments: Any, doing: str, timeout: float = ANSWER_TIMEOUT_S) -> None:
        calls = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        wait_for(by_name(self._slots, calls), doing, timeout)

    def _meeting_points(self) -> dict[int, str]:
        """Engine rank -> address where its nodes meet; empty when every engine has one node."""
        firsts = [
            (slot, actor)
            for slot, actor in zip(self._slots, self._actors, strict=True)
            if slot.nnodes > 1 and slot.node_rank == 0
        ]
        asked = {slot.name: actor.pick_dist_init_addr.remote() for slot, actor in firsts}
        found = wait_for(asked, "choosing where the nodes of an engine meet", ANSWER_TIMEOUT_S)
        return {slot.rank: found[slot.name] for slot, _ in firsts}

    def _create_actor(self, slot: EngineSlot, placement: Placement, engine_cls: type) -> Any:
        devices = {"num_gpus": ENGINE_SHARE} if self._args.accelerator == "cuda" else {}
        return (
            ray.remote(engine_cls)
            .options(
                num_cpus=ENGINE_SHARE,
                scheduling_strategy=placement.strategy(slot.slot),
                runtime_env={"env_vars": add_default_ray_env_vars(self._args.accelerator, SUPERVISED)},
                **devices,
            )
            .remote(self._args, slot)
        )
