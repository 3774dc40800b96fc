"""The driver's algorithm: what happens in which order, with trainer and rollout manager replaced by recorders."""

from contextlib import nullcontext

import pytest

import train as driver
from slime.ray import placement_group
from slime.ray.rollout import RolloutBatch
from tests.helpers.ray_args import make_args


class Run:
    """Records the calls of one run, and what was logged."""

    def __init__(self, monkeypatch, start=0, per_epoch=None, critic=None, **changes):
        self.events: list = []
        self.logged: list[tuple[str, int, dict]] = []
        self.closed: str | None = None
        self.start, self.per_epoch = start, per_epoch
        if critic is not None:
            critic.events = self.events
        for name, made in (
            ("create_placement_groups", lambda args: {"actor": None, "rollout": None}),
            ("create_rollout_manager", lambda args, placement: (self, per_epoch)),
            ("create_training_models", lambda args, placements, manager: (self, critic, start)),
        ):
            monkeypatch.setattr(placement_group, name, made)
        monkeypatch.setattr(driver, "Tracking", self._tracking)
        self.args = make_args(**changes)

    def go(self):
        driver.train(self.args)
        return self

    def _tracking(self, args):
        self.num_rollout = args.num_rollout
        return self

    def log(self, step, metrics, step_key):
        self.logged.append((step_key, step, metrics))

    def close(self, status=None):
        if status is None:
            self.events.append("close")
        else:
            self.closed = status

    def generate(self, rollout_id):
        self.events.append(f"generate {rollout_id}")
        return RolloutBatch([], {"rollout/raw_reward": 0.5})

    def train(self, rollout_id, data_refs, values=None):
        self.events.append(f"train {rollout_id}" + (f" with {values}" if values else ""))
        return {"train/loss": 1.0}

    def eval(self, rollout_id):
        self.events.append(f"eval {rollout_id}")
        return {"eval/held_out": 0.1}

    def save(self, rollout_id):
        self.events.append(f"save data {rollout_id}")

    def save_model(self, rollout_id, force_sync):
        self.events.append(f"save model {rollout_id}" + (" sync" if force_sync else ""))
        return {"perf/save_model_time": 1.0}

    def update_weights(self):
        self.events.append("push")
        return {"perf/update_weights_time": 1.0}

    def explaining_failures(self):
        return nullcontext()

    def __getattr__(self, name):
        if name not in ("clear_memory", "offload", "onload_weights", "onload_kv", "dispose"):
            raise AttributeError(name)
        return lambda: self.events.append(name)

    def only(self, *words):
        return [event for event in self.events if event.startswith(words)]


class Critic:
    """The critic's part of such a run, in the same record."""

    def train(self, rollout_id, data_refs, values=None):
        assert values is None
        self.events.append(f"critic trains {rollout_id}")
        self.rollout_id = rollout_id
        return {"train/critic-value_loss": 2.0}

    def values(self):
        return [f"values {self.rollout_id}"]

    def save_model(self, rollout_id, force_sync):
        self.events.append(f"critic saves {rollout_id}" + (" sync" if force_sync else ""))
        return {"perf/critic-save_model_time": 1.0}

    def __getattr__(self, name):
        if name not in ("clear_memory", "close"):
            raise AttributeError(name)
        return lambda: self.events.append(f"critic {name}")


def test_the_critic_trains_and_is_saved_before_the_actor_and_alone_at_first(monkeypatch):
    """Its values reach the actor's training; in the first rollouts, and in their checkpoints, it is the only model.

    Saved in the other order, a run killed in between would leave an actor that is ahead of its critic.
    """
    run = Run(monkeypatch, num_rollout=2, save_interval=1, critic=Critic(), num_critic_only_steps=1).go()
    assert run.events == [
        *("push", "generate 0", "critic trains 0", "save data 0", "critic saves 0", "critic clear_memory", "push"),
        *("generate 1", "critic trains 1", "train 1 with ['values 1']"),
        *("save data 1", "critic saves 1 sync", "save model 1 sync", "critic clear_memory", "clear_memory", "push"),
        *("critic close", "close", "dispose"),
    ]
    rows = [metrics for key, _, metrics in run.logged if key == "rollout/step"]
    assert [row["train/critic-value_loss"] for row in rows] == [2.0, 2.0]
    assert ["train/loss" in row for row in rows] == [False, True]


def test_order_of_a_plain_run(monkeypatch):
    run = Run(monkeypatch, num_rollout=2).go()
    step = ["generate {0}", "train {0}", "clear_memory", "push"]
    steps = [event.format(i) for i in range(2) for event in step]
    assert run.events == ["push", *steps, "close", "dispose"]
    assert run.closed == "finished"


def test_engines_make_room_while_the_trainer_works(monkeypatch):
    run = Run(monkeypatch, num_rollout=1, colocate=True, offload_rollout=True, offload_train=True).go()
    push = ["onload_weights", "push", "onload_kv"]
    assert run.events == [*push, "generate 0", "offload", "train 0", *push, "close", "dispose"]


def test_the_data_position_is_on_disk_before_the_checkpoint_that_needs_it(monkeypatch):
    run = Run(monkeypatch, num_rollout=5, save_interval=2).go()
    saves = ["save data 1", "save model 1", "save data 3", "save model 3", "save data 4", "save model 4 sync"]
    assert run.only("save") == saves
    without = Run(monkeypatch, num_rollout=2, save_interval=2, rollout_global_dataset=False).go()
    assert without.only("save") == ["save model 1 sync"]


def test_a_checkpoint_holds_the_step_it_is_named_after(monkeypatch):
    run = Run(monkeypatch, num_rollout=2, save_interval=1).go()
    assert run.only("train", "save model") == ["train 0", "save model 0", "train 1", "save model 1 sync"]


@pytest.mark.parametrize(
    "changes, evaluations",
    [
        ({"num_rollout": 5, "eval_interval": 2}, [(0, 0), (2, 1), (4, 3), (5, 4)]),
        ({"num_rollout": 4, "eval_interval": 2}, [(0, 0), (2, 1), (4, 3)]),
        ({"num_rollout": 3, "eval_interval": 10}, [(0, 0), (3, 2)]),
        ({"num_rollout": 2, "eval_interval": 1, "skip_eval_before_train": True}, [(1, 0), (2, 1)]),
        ({"num_rollout": 3, "eval_interval": 3, "start": 1}, [(3, 2)]),
        ({"num_rollout": 0, "eval_interval": 5}, [(0, 0)]),
        ({"num_rollout": 0, "eval_interval": 5, "skip_eval_before_train": True}, [(0, 0)]),
        ({"num_rollout": 0, "eval_interval": 5, "start": 7}, [(0, 0)]),
        ({"num_rollout": 3, "eval_interval": None}, []),
        ({"num_rollout": None, "num_epoch": 2, "per_epoch": 3, "eval_interval": 100}, [(0, 0), (3, 2), (6, 5)]),
    ],
)
def test_when_it_evaluates(monkeypatch, changes, evaluations):
    """(rollouts trained on, rollout id): before training, periodically, at epoch ends, once after the last rollout."""
    run = Run(monkeypatch, **changes).go()
    assert [step for key, step, _ in run.logged if key == "eval/step"] == [step for step, _ in evaluations]
    assert run.only("eval") == [f"eval {rollout_id}" for _, rollout_id in evaluations]


def test_evaluation_uses_pushed_weights(monkeypatch):
    run = Run(monkeypatch, num_rollout=2, eval_interval=1).go()
    assert run.only("train", "push", "eval") == [
        "push",
        "eval 0",
        "train 0",
        "push",
        "eval 0",
        "train 1",
        "push",
        "eval 1",
    ]


def test_resume_starts_after_the_loaded_rollout(monkeypatch):
    assert Run(monkeypatch, num_rollout=4, start=2).go().only("generate") == ["generate 2", "generate 3"]
    assert Run(monkeypatch, num_rollout=4, start=4).go().only("generate") == []


def test_epochs_become_rollouts(monkeypatch):
    run = Run(monkeypatch, num_rollout=None, num_epoch=2, per_epoch=3).go()
    assert len(run.only("generate")) == 6 and run.num_rollout == 6


def test_one_row_of_metrics_a_step(monkeypatch):
    run = Run(monkeypatch, num_rollout=2, save_interval=1).go()
    rows = [(step, metrics) for key, step, metrics in run.logged if key == "rollout/step"]
    assert [step for step, _ in rows] == [0, 1]
    measured = {f"perf/{name}_time" for name in ("generate", "train", "save", "sync", "step")}
    assert rows[0][1].keys() == measured | {
        "rollout/raw_reward", "train/loss", "perf/save_model_time", "perf/update_weights_time",
    }  # fmt: skip
    parts = sum(rows[0][1][f"perf/{name}_time"] for name in ("generate", "train", "save", "sync"))
    assert 0 < parts <= rows[0][1]["perf/step_time"]


def test_a_failed_run_is_recorded_as_failed(monkeypatch):
    run = Run(monkeypatch, num_rollout=2)
    run.train = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.go()
    assert run.closed == "failed"
