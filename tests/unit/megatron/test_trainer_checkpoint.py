"""A resumed run goes on exactly where it stopped, and an interrupted save leaves the previous checkpoint usable."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.trainer import trainer_args
from tests.helpers.trainer_runs import open_trainer, run_resume, train_rollouts

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return str(make_tiny_model("qwen3", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def one_rank(hf, tmp_path_factory):
    return run_ranks(_one_rank, 1, hf, str(tmp_path_factory.mktemp("one")))[0]


@pytest.fixture(scope="module")
def two_ranks(hf, tmp_path_factory):
    return run_ranks(run_resume, 2, hf, str(tmp_path_factory.mktemp("two")), [], {"tp2": TP2, "pp2": PP2})[0]


def test_resume_on_one_rank_is_bit_exact(one_rank):
    assert_continues_exactly(one_rank["resume"])


def test_resume_with_two_data_parallel_ranks_is_bit_exact(two_ranks):
    assert_continues_exactly(two_ranks)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_resume_in_another_layout_continues_the_run(two_ranks, layout):
    """Weights, optimizer moments and the schedule are resharded: later metrics agree to rounding."""
    start, metrics, _ = two_ranks[layout]
    assert start == 2
    for rollout, expected in zip(metrics, two_ranks["expected"][0], strict=True):
        for key, value in expected.items():
            assert rollout[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key


def test_an_interrupted_save_leaves_the_previous_checkpoint(one_rank):
    """The writer fails half way: the tracker still names the old checkpoint, it loads, and the next save succeeds."""
    result = one_rank["interrupted"]
    assert "disk full" in result["error"]
    assert result["tracker_after_failure"] == "0"
    assert result["start_after_failure"] == 1
    assert result["names_after_retry"] == ["iter_0000000", "iter_0000001", "latest_checkpointed_iteration.txt"]
    assert result["tracker_after_retry"] == "1"


def test_saving_a_step_again_replaces_it(one_rank):
    assert one_rank["interrupted"]["start_after_second_save_of_step_1"] == 2


def test_saving_starts_no_helper_process(one_rank):
    assert one_rank["interrupted"]["children"] == []


def test_a_step_can_be_chosen_by_its_directory(one_rank):
    assert one_rank["interrupted"]["start_from_iter_1_directory"] == 2


def test_a_converted_checkpoint_starts_anew_by_either_of_its_names(one_rank):
    assert one_rank["interrupted"]["start_from_release"] == [0, 0]


def test_a_run_of_constant_learning_rate_can_be_made_longer(one_rank):
    """Neither its decay nor its weight decay depends on the length, so no flag is needed."""
    start, metrics = one_rank["longer"]["constant"]
    assert start == 1 and metrics["train/lr-pg_0"] == pytest.approx(1e-3) and metrics["train/grad_norm"] > 0


def test_a_longer_decay_is_refused_until_the_user_chooses(one_rank):
    """5 or 9 rollouts of 8 samples; after two of them a linear decay stands at 1 - 2/5 or 1 - 2/9."""
    longer = one_rank["longer"]
    for part in (
        "learning-rate decay in samples was 40, is 72",
        "--override-opt-param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
        "--num-rollout",
    ):
        assert part in longer["refused"]
    assert "weight" not in longer["refused"]
    for flag, length in (("--override-opt-param-scheduler", 9), ("--use-checkpoint-opt-param-scheduler", 5)):
        start, metrics = longer[flag]
        assert start == 1 and metrics["train/lr-pg_0"] == pytest.approx(1e-3 * (1 - 2 / length))


def assert_continues_exactly(result):
    expected_metrics, expected_weights = result["expected"]
    start, metrics, weights = result["same"]
    assert (result["first_id"], start) == (0, 2)
    assert metrics == expected_metrics
    assert expected_metrics[0]["train/lr-pg_0"] != expected_metrics[1]["train/lr-pg_0"]  # the schedule was moving
    for name, expected in expected_weights.items():
        assert np.array_equal(weights[name], expected), name


def _one_rank(rank, world_size, hf, directory):
    resume = run_resume(rank, world_size, hf, f"{directory}/resume", [], {})
    root = Path(directory)
    return {
        "resume": resume,
        "interrupted": _interrupted_save(hf, root / "interrupted"),
        "longer": _longer(hf, root / "longer"),
    }


def _longer(hf, root):
    """Saves after the first of 5 rollouts, with constant and with linear decay; goes on as a run of 9."""
    from slime.backends.megatron_utils.initialize import shutdown_megatron

    def train(directory, num_rollout, *flags):
        values = {"save": str(directory), "load": str(directory), "num_rollout": num_rollout}
        with open_trainer(trainer_args("qwen3", hf, *flags, **values), 0, 1) as trainer:
            start = trainer.start_rollout_id
            (metrics,) = train_rollouts(trainer, range(start, start + 1))
            if start == 0:
                trainer.save_model(0)
        return start, metrics

    linear = ("--lr-decay-style", "linear")
    train(root / "constant", 5)
    train(root / "linear", 5, *linear)
    result = {"constant": train(root / "constant", 9)}
    try:
        train(root / "linear", 9, *linear)
    except ValueError as error:
        result["refused"] = str(error)
        shutdown_megatron()
    for flag in ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        result[flag] = train(root / "linear", 9, *linear, flag)
    return result


def _interrupted_save(hf, root):
    import psutil

    values = {"save": str(root), "load": str(root)}
    tracker = root / "latest_checkpointed_iteration.txt"
    result = {}

    def start_id(load=root):
        with open_trainer(trainer_args("qwen3", hf, save=str(root), load=str(load)), 0, 1) as trainer:
            return trainer.start_rollout_id

    with open_trainer(trainer_args("qwen3", hf, **values), 0, 1) as trainer:
        from megatron.core import dist_checkpointing

        train_rollouts(trainer, range(1))
        trainer.save_model(0)
        write = dist_checkpointing.save

        def fail(state_dict, checkpoint_dir, *args, **kwargs):
            (Path(checkpoint_dir) / "__0_0.distcp").write_bytes(b"half")
            raise OSError("disk full")

        dist_checkpointing.save = fail
        try:
            trainer.save_model(1)
        except OSError as error:
            result["error"] = str(error)
        finally:
            dist_checkpointing.save = write
    result["tracker_after_failure"] = tracker.read_text()
    result["start_after_failure"] = start_id()
    with open_trainer(trainer_args("qwen3", hf, **values), 0, 1) as trainer:
        train_rollouts(trainer, range(1, 2))
        trainer.save_model(1)
        result["names_after_retry"] = sorted(path.name for path in root.iterdir())
        result["tracker_after_retry"] = tracker.read_text()
        trainer.save_model(1)
        result["children"] = [child.name() for child in psutil.Process().children()]
    result["start_after_second_save_of_step_1"] = start_id()
    result["start_from_iter_1_directory"] = start_id(root / "iter_0000001")
    converted = root.parent / "converted"
    shutil.copytree(root / "iter_0000001", converted / "release")
    (converted / tracker.name).write_text("release")
    result["start_from_release"] = [start_id(place) for place in (converted, converted / "release")]
    return result
