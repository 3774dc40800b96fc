"""The rollout manager as a plain object: what it makes of samples, and that it does not outwait a dead engine."""

import time
from types import SimpleNamespace

import pytest
import ray

from slime.ray import rollout
from slime.ray.rollout import RolloutManager
from slime.utils.engine_client import EngineError
from slime.utils.http_utils import HttpError
from tests.helpers.ray_args import make_args

LAYOUT = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


class FakePool:
    """Engines of which one may be dead."""

    def __init__(self, args, placement) -> None:
        self.router = SimpleNamespace(host="10.0.0.1", port=3000)
        self.error: str | None = None
        self.calls: list = []
        self.infos = ["engine"]

    def start(self) -> None:
        self.calls.append("start")

    def check(self) -> None:
        if self.error:
            raise EngineError(self.error)

    def offload(self) -> None:
        self.calls.append("offload")

    def onload(self, tags) -> None:
        self.calls.append(tags)

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
def make_manager(monkeypatch):
    monkeypatch.setattr(rollout, "EnginePool", FakePool)
    monkeypatch.setattr(rollout, "WATCH_INTERVAL_S", 0.05)

    def make(**changes) -> RolloutManager:
        manager = RolloutManager(make_args(**{"rollout_global_dataset": False, **changes}), None)
        manager.prepare()
        return manager

    return make


def test_a_rollout_becomes_one_object_per_data_parallel_rank(make_manager, cluster):
    manager = make_manager()
    manager.set_train_parallel_config(LAYOUT)
    batch = manager.generate(0)
    parts = [ray.get(box.inner) for box in batch.data_refs]
    assert sorted(index for part in parts for index in part["sample_indices"]) == list(range(8))
    assert [len(part["tokens"]) for part in parts] == [4, 4]
    assert batch.metrics["rollout/raw_reward"] == 0.5 and batch.metrics["rollout/extra"] == 7.0
    assert batch.metrics["perf/rollout_time"] > 0


def test_rollout_functions_see_the_router(make_manager):
    args = make_manager().args
    assert (args.sglang_router_ip, args.sglang_router_port) == ("10.0.0.1", 3000)


def test_rollout_only_makes_no_train_data(make_manager):
    batch = make_manager(debug_rollout_only=True).generate(0)
    assert batch.data_refs is None and batch.metrics["rollout/raw_reward"] == 0.5


def test_generate_before_the_layout_is_known_is_an_error(make_manager):
    with pytest.raises(RuntimeError, match="set_train_parallel_config"):
        make_manager().generate(0)


def test_train_only_has_no_engines_and_no_eval(make_manager):
    manager = make_manager(debug_train_only=True)
    manager.start()
    manager.offload()
    manager.onload_weights()
    assert manager.engines() == [] and manager.eval(0) == {}
    manager.dispose()


def test_a_dump_is_replayed_without_engines(make_manager, cluster, tmp_path):
    dump = str(tmp_path / "{rollout_id}.pt")
    recorder = make_manager(save_debug_rollout_data=dump, debug_rollout_only=True)
    recorder.generate(3)
    player = make_manager(load_debug_rollout_data=dump)
    player.set_train_parallel_config(LAYOUT)
    assert len(player.generate(3).data_refs) == 2
    with pytest.raises(FileNotFoundError, match="rollout 4"):
        player.generate(4)


def test_eval(make_manager):
    assert make_manager().eval(0)["eval/held_out"] == 0.5


def test_memory_tags(make_manager):
    manager = make_manager()
    pool = manager._pool
    (
        manager.start(),
        manager.offload(),
        manager.onload_weights(),
        manager.onload_kv(),
        manager.dispose(),
        manager.dispose(),
    )
    assert pool.calls == ["start", "offload", ["weights"], ["kv_cache", "cuda_graph"], "stop"]


def test_an_engine_that_dies_ends_a_rollout_that_would_wait_for_ever(make_manager):
    manager = make_manager(rollout_function_path="tests.helpers.fake_run.hang")
    manager._pool.error = "engine 1 ended with status 9; last lines of its log: OOM"
    started = time.monotonic()
    with pytest.raises(EngineError, match="status 9.*OOM"):
        manager.generate(0)
    assert time.monotonic() - started < 10


def test_a_request_that_fails_because_its_engine_is_dying_tells_the_engines_story(make_manager):
    """The request fails a moment before the engine's process is gone."""
    manager = make_manager()
    checks = iter([None, None, "engine 0 ended with status 1"])

    def check():
        if (error := next(checks)) is not None:
            raise EngineError(error)

    manager._pool.check = check

    def request():
        raise HttpError("POST http://10.0.0.1:3000/generate failed after 61 attempts")

    with pytest.raises(EngineError, match="engine 0 ended") as caught:
        manager._watched(request, "rollout 0")
    assert isinstance(caught.value.__cause__, HttpError)


def test_other_errors_of_a_rollout_function_pass_unchanged(make_manager, monkeypatch):
    manager = make_manager()
    monkeypatch.setattr(rollout, "POST_MORTEM_S", 0.1)
    for error in (HttpError("refused"), TimeoutError("stalled"), ValueError("bad row")):

        def fail(error=error):
            raise error

        with pytest.raises(type(error), match=str(error)):
            manager._watched(fail, "rollout 0")


def test_rollouts_per_epoch(make_manager):
    manager = make_manager(rollout_batch_size=4)
    manager.data_source = range(11)
    assert manager.get_num_rollout_per_epoch() == 2
    manager.data_source = range(3)
    with pytest.raises(ValueError, match="3 prompts .* --rollout-batch-size 4; lower it to 3"):
        manager.get_num_rollout_per_epoch()
