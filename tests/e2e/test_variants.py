"""Other layouts of the GRPO part of the quickstart, with real engines, from the same SFT checkpoint; and a run that is
interrupted, resumed, and then loses its engine."""

import os
import re
import signal

import pytest
import torch

from tests.helpers.e2e import Train, assert_whole_checkpoint, numbers, read_rows, without

pytestmark = pytest.mark.e2e

TWO_RANKS = ("--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "2")


def start(folder, arguments, *flags, output="output.txt"):
    paths = {"--save": "save", "--save-hf": "final", "--metrics-jsonl": "metrics.jsonl"}
    ours = [word for flag, name in paths.items() for word in (flag, str(folder / name))]
    return Train([*arguments, *ours, *flags], folder / output)


def two_rollouts(quickstart, folder, arguments, *flags):
    """Two rollouts without evaluation; returns ({step: metrics}, samples of each rollout)."""
    arguments = without(arguments, "--eval-interval", "--save-interval")
    dump = str(folder / "dump_{rollout_id}.pt")
    more = ("--num-rollout", "2", "--save-debug-rollout-data", dump)
    run = start(folder, arguments, *more, *flags)
    try:
        run.succeed(300)
    finally:
        run.kill_everything()
    samples = [torch.load(dump.format(rollout_id=i), weights_only=True)["samples"] for i in range(2)]
    assert [{v for sample in each for v in sample["weight_versions"]} for each in samples] == [{"1"}, {"2"}]
    return read_rows(folder / "metrics.jsonl"), samples


def assert_same_as_one_rank(quickstart, steps, samples):
    """Both rollouts have good log-probs. The first, made with the same weights and seeds as the quickstart's, has the
    same tokens, and trained on by two ranks it gives the same numbers up to rounding."""
    assert list(steps) == [0, 1]
    assert all(0 < row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in steps.values())
    known = torch.load(quickstart.dump.format(rollout_id=0), weights_only=True)["samples"]
    assert [sample["tokens"] for sample in samples[0]] == [sample["tokens"] for sample in known]
    expected = read_rows(quickstart.folder / "metrics.jsonl")[0]
    for name in ("train/loss", "train/pg_loss", "train/entropy_loss", "train/grad_norm", "rollout/rollout_log_probs"):
        assert steps[0][name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_two_tensor_parallel_ranks_and_two_engines(quickstart, tmp_path):
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--rollout-num-gpus", "2")
    assert_same_as_one_rank(quickstart, *two_rollouts(quickstart, tmp_path, quickstart.grpo, *TWO_RANKS, *flags))
    logs = sorted((tmp_path / "save" / "logs").glob("sglang_engine_*.log"))
    served = [len(re.findall(r'"POST /generate HTTP/1.1" 200', log.read_text())) for log in logs]
    assert len(served) == 2 and min(served) > 0.1 * sum(served), served


def test_two_data_parallel_ranks_beside_one_engine(quickstart, tmp_path):
    """Trainers and engine on slots of their own: weights travel by broadcast."""
    arguments = without(quickstart.grpo, "--colocate")
    flags = (*TWO_RANKS, "--rollout-num-gpus", "1")
    assert_same_as_one_rank(quickstart, *two_rollouts(quickstart, tmp_path, arguments, *flags))


def test_interrupted_resumed_and_an_engine_killed(quickstart, tmp_path, launches):
    """Ctrl-C while the second rollout is generated; resumed, that rollout is the uninterrupted run's, sample by sample
    and number by number; then kill -9 of the engine while the third is generated."""
    expected = read_rows(quickstart.folder / "metrics.jsonl")
    arguments = without(quickstart.grpo, "--eval-interval", "--save-hf")
    flags = ("--save-interval", "1")
    first = start(tmp_path, without(arguments, "--save-debug-rollout-data"), *flags)
    launches.append(first)
    first.wait_for("step 1/3: ")
    first.press_ctrl_c()
    assert first.end() == 130, first.tail()
    first.assert_nothing_remains()
    assert "stopped by SIGINT" in first.text()
    assert_whole_checkpoint(tmp_path / "save", 0)

    dump = str(tmp_path / "dump_{rollout_id}.pt")
    flags += ("--load", str(tmp_path / "save"), "--save-debug-rollout-data", dump)
    second = start(tmp_path, arguments, *flags, output="second.txt")
    launches.append(second)
    second.wait_for("step 2/3: ")
    (scheduler,) = [pid for pid, command in second.remaining().items() if command.startswith("sglang::scheduler")]
    os.kill(scheduler, signal.SIGKILL)
    block = second.fail()
    assert re.search(r"SGLang engine 0 .*sglang_engine_0_node_0\.log", block), block
    assert_whole_checkpoint(tmp_path / "save", 1)

    steps = read_rows(tmp_path / "metrics.jsonl")
    assert list(steps) == [0, 1]
    for step, row in steps.items():
        mine, theirs = (numbers(each, "train", "rollout") for each in (row, expected[step]))
        for cache_dependent in ("rollout/prefix_cache_hit_rate", "rollout/avg_cached_tokens_per_sample"):
            del mine[cache_dependent], theirs[cache_dependent]
        assert mine == theirs, step
    mine, theirs = (
        torch.load(template.format(rollout_id=1), weights_only=True)["samples"] for template in (dump, quickstart.dump)
    )
    for key in ("index", "prompt", "tokens", "rollout_log_probs", "reward"):
        assert [sample[key] for sample in mine] == [sample[key] for sample in theirs], key
