"""Starting, watching and stopping engines together, with real Ray actors around engines without a server."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import ray

from slime.ray import engine_pool
from slime.ray.engine_pool import EnginePool
from slime.ray.placement_group import create_placement_groups
from slime.utils.engine_client import EngineError
from tests.helpers.fake_run import FakeEngine
from tests.helpers.ray_args import make_args


class FakeRouter:
    """Records the workers it is told of."""

    def __init__(self, args, **options) -> None:
        self.url, self.workers, self.stopped, self.error = "http://127.0.0.1:3000", [], False, None
        self.client = SimpleNamespace(add_worker=self.workers.append)

    def wait_ready(self, timeout) -> None:
        pass

    def check_alive(self) -> None:
        if self.error:
            raise EngineError(self.error)

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def make_pool(cluster, monkeypatch):
    """Builds pools of fake engines; ends them afterwards."""
    monkeypatch.setattr(engine_pool, "Router", FakeRouter)
    pools, groups = [], []

    def make(**changes):
        args = make_args(actor_num_gpus_per_node=1, **changes)
        groups.append(create_placement_groups(args)["rollout"])
        pools.append(EnginePool(args, groups[-1], engine_cls=FakeEngine))
        return pools[-1]

    yield make
    for pool in pools:
        pool.stop()
    for group in groups:
        ray.util.remove_placement_group(group.pg)


def calls(pool):
    return ray.get([actor.calls.remote() for actor in pool._actors])


def test_start_registers_every_engine(make_pool):
    pool = make_pool()
    pool.start()
    urls = ["http://127.0.0.1:15000", "http://127.0.0.1:15001"]
    assert [info.url for info in pool.infos] == pool.router.workers == urls
    assert [(info.rank, info.gpu_offset) for info in pool.infos] == [(0, 0), (1, 1)]
    assert calls(pool) == [["start None"]] * 2
    pool.check()


def test_nodes_of_an_engine_meet_at_the_address_of_its_first(make_pool):
    pool = make_pool(rollout_num_gpus=4, rollout_num_gpus_per_engine=2, num_gpus_per_node=1)
    pool.start()
    assert calls(pool) == [["start 127.0.0.1:21000"]] * 2 + [["start 127.0.0.1:21001"]] * 2
    assert [info.rank for info in pool.infos] == [0, 1]


def test_memory_comes_and_goes_on_all_engines(make_pool):
    pool = make_pool()
    pool.offload()
    pool.onload(["weights"])
    pool.onload(["kv_cache", "cuda_graph"])
    assert calls(pool) == [["release", "resume weights", "resume kv_cache,cuda_graph"]] * 2


def test_a_dead_server_tells_its_story(make_pool):
    pool = make_pool()
    ray.get(pool._actors[1].die.remote("engine 1 ended with status 9; last lines of its log: OOM"))
    with pytest.raises(EngineError, match="status 9.*OOM"):
        pool.check()


def test_a_dead_router_is_noticed(make_pool):
    pool = make_pool()
    pool.router.error = "router ended with status 1"
    with pytest.raises(EngineError, match="router ended"):
        pool.check()


def test_a_dead_engine_actor_is_noticed(make_pool):
    """The process around the server is gone, for instance killed for memory."""
    pool = make_pool()
    pid = ray.get(pool._actors[0].__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    with pytest.raises(EngineError, match="actor died"):
        while time.monotonic() < deadline:
            pool.check()


def test_stop_ends_engines_and_router_and_may_be_repeated(make_pool):
    pool = make_pool()
    actor = pool._actors[0]
    pool.stop()
    assert pool.router.stopped
    deadline = time.monotonic() + 30
    with pytest.raises(ray.exceptions.RayActorError):
        while time.monotonic() < deadline:  # ray.kill returns before the actor has died
            ray.get(actor.calls.remote(), timeout=30)
    pool.stop()
