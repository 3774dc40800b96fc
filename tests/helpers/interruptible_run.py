"""A run with the real driver, Ray, placement, trainer group and process handling, but without a model or servers.

    python -m tests.helpers.interruptible_run LOG_DIR MODE

Prints a line at each milestone. MODE: "hang" generates for ever, "crash" kills an engine's process during generation,
"error" makes the rollout function raise, "finish" ends in order after one rollout.
"""

import os
import sys
from functools import partial
from pathlib import Path

import train as driver
from slime.backends.sglang_utils.server_process import ManagedProcess
from slime.ray import engine_pool, placement_group, rollout
from slime.ray.actor_group import RayTrainGroup
from slime.ray.driver import run_driver
from slime.ray.rollout_client import RolloutClient
from slime.utils.engine_client import EngineInfo
from tests.helpers.fake_run import FakeEngine, FakeTrainer
from tests.helpers.ray_args import make_args

# Like SGLang: the process has children of its own, and prints to its log.
SERVER = """
import subprocess, sys, time
print("serving", flush=True)
subprocess.Popen(["sleep", "600"])
time.sleep(float(sys.argv[1]))
"""


def sleeper(name: str, log_dir: str, seconds: float = 600.0) -> ManagedProcess:
    """A process tree that does nothing for a while."""
    return ManagedProcess(
        name, [sys.executable, "-c", SERVER, str(seconds)], os.environ, Path(log_dir) / f"{name}.log"
    )


class ProcessEngine(FakeEngine):
    """An engine with a real process tree instead of a server."""

    def __init__(self, args, slot) -> None:
        super().__init__(args, slot)
        self._args = args

    def start(self, dist_init_addr):
        dies = self._args.mode == "crash" and self._slot.rank == 1
        self._process = sleeper(f"engine {self._slot.rank}", self._args.log_dir, 8.0 if dies else 600.0)
        return super().start(dist_init_addr)

    def check(self) -> None:
        self._process.check_alive()

    def stop(self) -> None:
        self._process.stop()


class ProcessRouter:
    """A router with a real process tree that routes nothing."""

    def __init__(self, args, **options) -> None:
        self._process = sleeper("router", args.log_dir)
        self.host, self.port, self.url, self.client = "127.0.0.1", 3000, "http://127.0.0.1:3000", self
        self.check_alive, self.stop = self._process.check_alive, self._process.stop

    def wait_ready(self, timeout: float) -> None:
        pass

    def add_worker(self, url: str) -> None:
        pass


class Manager(rollout.RolloutManager):
    """The real one over processes that are no engines."""

    def __init__(self, args, placement) -> None:
        engine_pool.Router = ProcessRouter
        rollout.EnginePool = partial(engine_pool.EnginePool, engine_cls=ProcessEngine)
        super().__init__(args, placement)

    def engines(self) -> list[EngineInfo]:
        print("milestone started", flush=True)
        return super().engines()


def misbehave(args, rollout_id, data_source, evaluation=False):
    """A rollout function that has something to say."""
    raise ValueError("run.jsonl:17: no label")


FUNCTIONS = {
    "hang": "tests.helpers.fake_run.hang",
    "crash": "tests.helpers.fake_run.hang",
    "error": "tests.helpers.interruptible_run.misbehave",
    "finish": "tests.helpers.fake_run.generate",
}


def main(log_dir: str, mode: str) -> int:
    """Exit code of the run."""
    placement_group.RolloutClient = partial(RolloutClient, manager_cls=Manager)
    placement_group.RayTrainGroup = partial(RayTrainGroup, actor_cls=FakeTrainer)
    args = make_args(
        log_dir=log_dir,
        mode=mode,
        num_rollout=1,
        rollout_function_path=FUNCTIONS[mode],
        rollout_global_dataset=False,
        progress="none",
    )
    print("milestone begun", flush=True)
    return run_driver(driver.train, args)


if __name__ == "__main__":
    from tests.helpers import interruptible_run  # under its own name, by which Ray's workers find the classes

    sys.exit(interruptible_run.main(sys.argv[1], sys.argv[2]))
