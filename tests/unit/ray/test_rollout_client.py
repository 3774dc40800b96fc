"""The driver's view of the rollout manager, with a real Ray actor that answers as it is told."""

import pytest

from slime.ray.rollout_client import RolloutClient
from slime.utils.engine_client import EngineError
from tests.helpers.fake_run import FakeManager
from tests.helpers.ray_args import make_args


def push_fails(client):
    with client.explaining_failures():
        raise EngineError("http://127.0.0.1:15000/update_weights_from_tensor cannot be reached")


def test_a_push_to_a_dying_engine_tells_the_engines_story(cluster):
    client = RolloutClient(make_args(dead="engine 0 ended with status 1; log: OOM"), None, manager_cls=FakeManager)
    with pytest.raises(EngineError, match="engine 0 ended") as caught:
        push_fails(client)
    assert "cannot be reached" in str(caught.value.__cause__)


def test_a_push_that_fails_with_all_engines_alive_fails_as_it_is(cluster):
    client = RolloutClient(make_args(dead=None), None, manager_cls=FakeManager)
    with pytest.raises(EngineError, match="cannot be reached"):
        push_fails(client)


def test_what_the_manager_cannot_prepare_is_the_error_of_the_first_wait(cluster):
    args = make_args(num_rollout=None, num_epoch=1, unprepared="data.jsonl:3: malformed row")
    with pytest.raises(ValueError, match="data.jsonl:3"):
        RolloutClient(args, None, manager_cls=FakeManager).get_num_rollout_per_epoch()
    with pytest.raises(ValueError, match="data.jsonl:3"):
        RolloutClient(args, None, manager_cls=FakeManager).wait_until_started()


def test_rollouts_per_epoch_only_without_num_rollout(cluster):
    client = RolloutClient(make_args(num_rollout=None, num_epoch=1), None, manager_cls=FakeManager)
    assert client.get_num_rollout_per_epoch() == 5
    client.wait_until_started()
    assert client.generate(3) == "rollout 3"
    assert RolloutClient(make_args(), None, manager_cls=FakeManager).get_num_rollout_per_epoch() is None
