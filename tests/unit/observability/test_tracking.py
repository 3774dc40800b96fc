"""Metrics on their way out: valid JSON lines, the destinations asked for, and errors before the first step."""

import json
import math
import sys
import types
from argparse import Namespace

import pytest

from slime.observability.tracking import SECRET_ARGS, STEP_OF_FAMILY, Tracking


def make_args(**changes) -> Namespace:
    values = {
        "progress": "none",
        "num_rollout": 5,
        "metrics_jsonl": None,
        "use_wandb": False,
        "use_tensorboard": False,
        "wandb_always_use_train_step": False,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 6,
        "global_batch_size": 8,
        "critic_args": None,
        "wandb_key": None,
        "wandb_mode": None,
        "wandb_host": None,
        "wandb_team": None,
        "wandb_project": "adding",
        "wandb_group": None,
        "wandb_random_suffix": True,
        "wandb_run_id": None,
        "wandb_dir": None,
        "tb_project_name": None,
        "tb_experiment_name": None,
    }
    assert not set(changes) - set(values)
    return Namespace(**(values | changes))


def rows_of(path) -> list[dict]:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_json_lines_are_valid_and_flushed_at_once(tmp_path):
    """NaN and infinity, which JSON does not have, become null; a reader sees a row as soon as it was logged."""
    path = tmp_path / "deep" / "metrics.jsonl"
    tracking = Tracking(make_args(metrics_jsonl=str(path)))
    tracking.log(0, {"train/loss": 0.5, "train/grad_norm": math.nan, "rollout/raw_reward": -math.inf, "perf/n": 7})
    first = rows_of(path)
    assert len(first) == 1 and first[0].pop("time") > 1.7e9
    assert first == [
        {"rollout/step": 0, "train/loss": 0.5, "train/grad_norm": None, "rollout/raw_reward": None, "perf/n": 7}
    ]
    tracking.log(3, {"eval/held_out": 1.0}, step_key="eval/step")
    tracking.close("finished")
    assert [{k: v for k, v in row.items() if k != "time"} for row in rows_of(path)][1:] == [
        {"eval/step": 3, "eval/held_out": 1.0}
    ]


def test_a_resumed_run_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (7, 8):
        tracking = Tracking(make_args(metrics_jsonl=str(path)))
        tracking.log(step, {"train/loss": float(step)})
        tracking.close("failed")
    assert [row["rollout/step"] for row in rows_of(path)] == [7, 8]


def test_steps_can_be_counted_in_optimizer_steps(tmp_path):
    """4 prompts x 6 responses / 8 per step = 3 optimizer steps a rollout."""
    path = tmp_path / "metrics.jsonl"
    tracking = Tracking(make_args(metrics_jsonl=str(path), wandb_always_use_train_step=True))
    tracking.log(5, {})
    tracking.close("finished")
    assert rows_of(path)[0]["rollout/step"] == 15


@pytest.mark.parametrize(
    "flags, package, message",
    [
        ({"use_wandb": True}, "wandb", r"--use-wandb needs the wandb package: pip install"),
        (
            {"use_tensorboard": True, "tb_project_name": "p"},
            "torch.utils.tensorboard",
            r"--use-tensorboard needs the t",
        ),
    ],
)
def test_a_missing_package_is_named_before_the_first_step(monkeypatch, flags, package, message):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=message):
        Tracking(make_args(**flags))


def test_tensorboard_needs_a_directory():
    with pytest.raises(ValueError, match="--tb-project-name"):
        Tracking(make_args(use_tensorboard=True))


class FakeWandB(types.ModuleType):
    """Records what Weights & Biases would be told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logins, self.step_of, self.rows, self.exit_code = [], {}, [], None

    def login(self, **kwargs) -> None:
        self.logins.append(kwargs)

    def init(self, **kwargs) -> "FakeWandB":
        self.settings = kwargs
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.step_of[name] = step_metric

    def log(self, row: dict) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_every_metric_with_the_step_it_is_drawn_against(wandb):
    tracking = Tracking(make_args(use_wandb=True))
    metrics = {f"{family}/x": 1.0 for family in STEP_OF_FAMILY if family != "eval"}
    tracking.log(2, metrics)
    tracking.log(2, {"eval/held_out": 0.5}, step_key="eval/step")
    tracking.close("failed")
    for row in wandb.rows:
        for name in row.keys() - {"rollout/step", "eval/step"}:
            assert row[wandb.step_of[f"{name.split('/')[0]}/*"]] == 2, name
    assert len(wandb.rows) == 2 and wandb.exit_code == 1


def test_wandb_never_uploads_the_key_and_logs_in_only_when_online(wandb):
    Tracking(make_args(use_wandb=True, wandb_key="s3cret", wandb_mode="offline")).close("finished")
    assert wandb.logins == [] and wandb.exit_code == 0
    assert "s3cret" not in str(wandb.settings) and not wandb.settings["config"].keys() & set(SECRET_ARGS)
    Tracking(make_args(use_wandb=True, wandb_key="s3cret")).close("finished")
    assert wandb.logins == [{"key": "s3cret", "host": None}]


def test_wandb_gets_the_critics_arguments_beside_the_actors_and_its_key_no_more_than_theirs(wandb):
    critic = make_args(wandb_key="s3cret", wandb_project="values")
    args = make_args(use_wandb=True, wandb_key="s3cret", wandb_mode="offline", critic_args=critic)
    Tracking(args).close("finished")
    config = wandb.settings["config"]
    assert (config["wandb_project"], config["critic/wandb_project"]) == ("adding", "values")
    assert "s3cret" not in str(wandb.settings) and "critic_args" not in config


def test_wandb_runs_of_a_group_get_different_names_unless_asked_not_to(wandb):
    names = set()
    for suffix in (True, True, False):
        Tracking(make_args(use_wandb=True, wandb_group="add", wandb_random_suffix=suffix)).close("finished")
        names.add(wandb.settings["name"])
    assert len(names) == 3 and "add" in names and all(name.startswith("add") for name in names)
