"""The trainer ranks as one object, with real Ray actors around trainers that do nothing."""

import pytest
import ray

from slime.ray.actor_group import RayTrainGroup
from slime.ray.placement_group import Placement, create_placement_groups
from slime.ray.utils import wait_for
from slime.utils.engine_client import EngineInfo
from tests.helpers.fake_run import FakeTrainer
from tests.helpers.ray_args import make_args


@pytest.fixture(scope="module")
def placement(cluster):
    placements = create_placement_groups(make_args())
    yield placements["actor"]
    ray.util.remove_placement_group(placements["actor"].pg)


def started_group(placement, **changes):
    group = RayTrainGroup(make_args(**changes), placement, with_ref=True, actor_cls=FakeTrainer)
    return group, group.started(wait_for(group.start(), "starting"))


def end(group):
    for actor in group._actors:
        ray.kill(actor)


def test_every_rank_gets_every_call_and_the_reporting_rank_gives_the_metrics(placement):
    group, start = started_group(placement, fake_start_ids=[5, 5])
    try:
        assert start == 5 and group.parallel_config["dp_size"] == 2
        group.connect_engines([EngineInfo("http://127.0.0.1:15000", 0, 1, 0)])
        assert group.train(5, [None, None]) == {"train/loss": 5.0}
        assert group.save_model(5, force_sync=True) == {"perf/save_model_time": 0.0}
        assert group.update_weights() == {"perf/update_weights_time": 0.0}
        group.close()
        expected = [
            ("init", "actor", True, "127.0.0.1", 20000),
            ("connect_engines", ["http://127.0.0.1:15000"]),
            ("train", 5, 2),
            ("save_model", 5, True),
            ("update_weights",),
            ("close",),
        ]
        assert ray.get([actor.calls.remote() for actor in group._actors]) == [expected, expected]
    finally:
        end(group)


def test_ranks_that_loaded_different_checkpoints_are_refused(placement):
    group = RayTrainGroup(make_args(fake_start_ids=[5, 4]), placement, actor_cls=FakeTrainer)
    reports = wait_for(group.start(), "starting")
    end(group)
    with pytest.raises(RuntimeError, match="'trainer rank 0': 5, 'trainer rank 1': 4"):
        group.started(reports)


def test_without_engines_weights_stay(placement):
    group, _ = started_group(placement)
    try:
        group.connect_engines([])
        assert group.update_weights() == {}
    finally:
        end(group)


def test_a_group_without_slots_does_nothing():
    group = RayTrainGroup(make_args(), Placement(None, (), (), ()), actor_cls=FakeTrainer)
    assert group.started(wait_for(group.start(), "starting")) == 0
    assert group.train(0, []) == group.save_model(0) == group.update_weights() == {}
    assert group.parallel_config is None
