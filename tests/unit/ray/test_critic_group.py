"""A critic beside the actor: on the same slots, its values rank by rank to the actor, and where the run starts."""

import pytest
import ray

from slime.ray import placement_group
from slime.ray.actor_group import RayTrainGroup
from slime.ray.placement import Placement
from slime.ray.placement_group import create_placement_groups, create_training_models
from slime.ray.utils import wait_for
from tests.helpers.fake_run import FakeTrainer
from tests.helpers.ray_args import make_args


def test_the_actor_gets_the_values_of_the_critic_on_the_same_rank(cluster):
    placements = create_placement_groups(make_args(rollout_num_gpus=0))
    assert placements["critic"] == placements["actor"]
    actor, critic = (
        RayTrainGroup(make_args(), placements[role], role=role, actor_cls=FakeTrainer) for role in ("actor", "critic")
    )
    try:
        assert list(critic.start()) == ["critic rank 0", "critic rank 1"]
        actor.started(wait_for(actor.start(), "starting"))
        assert critic.train(3, [None, None]) == {"train/loss": 3.0}
        assert actor.train(3, [None, None], critic.values()) == {"train/loss": 3.0}
        assert ray.get(actor.async_train(4, [None, None], critic.values()))[1] == {"train/loss": 4.0}
        for rank, calls in enumerate(ray.get([trainer.calls.remote() for trainer in actor._actors])):
            values = {"values": [float(rank)]}
            assert calls[1:] == [("train", 3, 2, values), ("train", 4, 2, values)]
        roles = [calls[0][1] for calls in ray.get([trainer.calls.remote() for trainer in critic._actors])]
        assert roles == ["critic", "critic"]
    finally:
        for trainer in actor._actors + critic._actors:
            ray.kill(trainer)
        ray.util.remove_placement_group(placements["actor"].pg)


class Group:
    """A trainer group that has loaded a checkpoint; the record says in which order the groups start."""

    record: list[str] = []

    def __init__(self, args, placement, role="actor", with_ref=False):
        self.args, self.role, self.with_ref = args, role, with_ref
        self.parallel_config = {"dp_size": 2, "cp_size": args.layouts[role]}

    def start(self):
        self.record.append(f"{self.role} starts")
        return {}

    def started(self, reports):
        self.record.append(f"{self.role} started")
        return self.args.starts[self.role]

    def connect_engines(self, engines):
        self.record.append(f"{self.role} connects")


class Manager:
    """A rollout manager whose engines are there."""

    loaded: int | None = None

    def starting(self):
        return {}

    def wait_until_started(self):
        pass

    def engines(self):
        return []

    def set_train_parallel_config(self, config):
        pass

    def load(self, rollout_id):
        self.loaded = rollout_id


def run(monkeypatch, actor, critic, layouts=(1, 1), **changes):
    """What create_training_models gives when the roles would start at these rollouts."""
    monkeypatch.setattr(placement_group, "RayTrainGroup", Group)
    Group.record = []
    both = {"starts": {"actor": actor, "critic": critic}, "layouts": {"actor": layouts[0], "critic": layouts[1]}}
    mine = make_args(**both, lr=0.5, num_rollout=None)
    args = make_args(**both, critic_args=mine, num_rollout=9, start_rollout_id=None, kl_coef=0.1).replace(**changes)
    nothing = Placement(None, (), (), ())
    manager = Manager()
    return (*create_training_models(args, {"actor": nothing, "critic": nothing}, manager), manager.loaded)


def test_a_critic_has_its_own_arguments_and_no_reference(monkeypatch):
    actor, critic, start, loaded = run(monkeypatch, 0, 0)
    assert (actor.with_ref, critic.with_ref, start, loaded) == (True, False, 0, None)
    assert critic.args.lr == 0.5 != actor.args.lr and critic.args.num_rollout == 9
    assert Group.record == ["actor starts", "critic starts", "actor started", "critic started", "actor connects"]


def test_on_gpus_the_critic_starts_when_the_actor_has_made_room(monkeypatch):
    run(monkeypatch, 0, 0, accelerator="cuda")
    assert Group.record == ["actor starts", "actor started", "critic starts", "critic started", "actor connects"]


@pytest.mark.parametrize("changes", [{"critic_args": None}, {"num_rollout": 0}, {"debug_rollout_only": True}])
def test_no_critic_where_none_is_trained(monkeypatch, changes):
    actor, critic, start, _ = run(monkeypatch, 4, 3, **changes)
    assert (critic, start) == (None, 4)


@pytest.mark.parametrize(
    ("actor", "critic", "critic_only", "start"),
    [(4, 4, 0, 4), (0, 2, 2, 2), (0, 1, 3, 1), (4, 0, 0, 4)],
    ids=["both resume", "the actor has not trained yet", "nor here", "a new critic for an actor"],
)
def test_both_roles_go_on_with_the_same_rollout(monkeypatch, actor, critic, critic_only, start):
    """start_rollout_id 0 is what the arguments say of an actor that has no checkpoint."""
    got = run(
        monkeypatch, actor, critic, num_critic_only_steps=critic_only, start_rollout_id=0 if actor == 0 else None
    )
    assert got[2:] == (start, start - 1)


@pytest.mark.parametrize(("actor", "critic", "critic_only"), [(4, 5, 0), (5, 4, 9), (0, 3, 2)])
def test_checkpoints_of_different_rollouts_are_refused(monkeypatch, actor, critic, critic_only):
    with pytest.raises(ValueError, match=f"continues at rollout {actor}, the critic's at {critic}"):
        run(monkeypatch, actor, critic, num_critic_only_steps=critic_only)


def test_other_layouts_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="'cp_size': 1}, the critic as .*'cp_size': 2}"):
        run(monkeypatch, 0, 0, layouts=(1, 2))
