"""PPO on the quickstart's model: a critic beside the actor, first alone; and a run that is resumed when only the
critic had a checkpoint."""

import shutil

import pytest
import yaml

from tests.helpers.e2e import Train, assert_nothing_half_written, assert_whole_checkpoint, numbers, read_rows, without

pytestmark = pytest.mark.e2e

LR, CRITIC_LR = 1e-5, 1e-3


def test_the_critic_learns_and_an_interrupted_run_continues_with_the_same_numbers(quickstart, tmp_path, launches):
    """Three rollouts, the first for the critic alone. Then the state of a run that was killed after its first save:
    resumed without engines on the same rollouts, both roles give the numbers of the whole run, to the last bit."""
    roles = tmp_path / "roles.yaml"
    roles.write_text(yaml.safe_dump({"megatron": [{"role": "critic", "overrides": {"lr": CRITIC_LR}}]}))
    save, dump = tmp_path / "save", str(tmp_path / "dump_{rollout_id}.pt")
    replaced = ("--load", "--save", "--save-hf", "--eval-interval", "--advantage-estimator", "--metrics-jsonl")
    replaced += ("--lr", "--save-interval", "--num-rollout", "--save-debug-rollout-data")
    arguments = without(quickstart.grpo, *replaced)
    arguments += ["--advantage-estimator", "ppo", "--num-critic-only-steps", "1", "--lambd", "0.95", "--lr", str(LR)]
    arguments += ["--normalize-advantages", "--megatron-config-path", str(roles), "--num-rollout", "3"]
    arguments += ["--save", str(save), "--load", str(save), "--save-interval", "1"]

    metrics = ["--metrics-jsonl", str(tmp_path / "whole.jsonl"), "--save-debug-rollout-data", dump]
    launches.append(whole := Train([*arguments, *metrics], tmp_path / "whole.txt"))
    whole.succeed()
    steps = read_rows(tmp_path / "whole.jsonl")
    assert list(steps) == [0, 1, 2] and "train/loss" not in steps[0]
    losses = [row["train/critic-value_loss"] for row in steps.values()]
    assert losses[2] < losses[1] < losses[0] and losses[2] < 0.8 * losses[0], losses
    assert all(0 < row["train/critic-grad_norm"] < 100 for row in steps.values())
    lrs = [(row["train/critic-lr-pg_0"] / CRITIC_LR, row["train/lr-pg_0"] / LR) for row in (steps[1], steps[2])]
    assert lrs == [pytest.approx((1 / 3, 2 / 3)), pytest.approx((0.0, 1 / 3))]  # linear decay, one step ahead
    assert all(0 < row["train/grad_norm"] < 100 for row in (steps[1], steps[2]))
    assert all(0 < row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in (steps[1], steps[2]))
    assert_whole_checkpoint(save, 2)
    assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    assert_nothing_half_written(save / "critic")

    as_after_the_first_save(save)
    replayed = [
        "--debug-train-only",
        "--load-debug-rollout-data",
        dump,
        "--metrics-jsonl",
        str(tmp_path / "rest.jsonl"),
    ]
    launches.append(rest := Train([*arguments, *replayed], tmp_path / "rest.txt"))
    rest.succeed()
    rows = read_rows(tmp_path / "rest.jsonl")
    assert list(rows) == [1, 2]
    for step, row in rows.items():
        assert numbers(row, "train") == numbers(steps[step], "train"), step
        for key in ("values", "returns", "advantages"):
            assert row[f"rollout/{key}"] == steps[step][f"rollout/{key}"], (step, key)
    assert_whole_checkpoint(save, 2)


def as_after_the_first_save(save):
    """Take away what the second and third rollout left: the actor has no checkpoint then."""
    for path in (*save.glob("iter_*"), *(save / "critic").glob("iter_000000[12]")):
        shutil.rmtree(path)
    (save / "latest_checkpointed_iteration.txt").unlink()
    (save / "critic" / "latest_checkpointed_iteration.txt").write_text("0")
