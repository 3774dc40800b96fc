"""Loss, metrics and every gradient of GRPO training do not depend on how the batch is cut up or laid over ranks."""

import numpy as np
import pytest

from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.trainer_runs import run_layouts

PER_TOKEN = {"calculate_per_token_loss": True}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
PP2 = ["--pipeline-model-parallel-size", "2"]
TP2 = ["--tensor-model-parallel-size", "2"]
OVERLAPPED = ["--overlap-grad-reduce", "--overlap-param-gather"]
# The policy loss as a user's loss: it gets logits, from Megatron's own output layer and its backward pass.
WHOLE_LOGITS = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "slime.backends.megatron_utils.loss.policy_loss_function",
}

ONE_RANK = {
    "reference": ([], {}),
    "four samples a micro-batch": ([], {"micro_batch_size": 4}),
    "packed by tokens": ([], DYNAMIC),
    "one padded pack": ([], {**DYNAMIC, "max_tokens_per_gpu": 4096, "data_pad_size_multiplier": 128}),
    "whole logits": ([], WHOLE_LOGITS),
    "two rows of logits at a time": ([], {**DYNAMIC, "log_probs_chunk_size": 2}),
    "recompute": (RECOMPUTE, {**DYNAMIC, "recompute_loss_function": True}),
    "per-token reference": ([], PER_TOKEN),
    "per token, packed by tokens": ([], PER_TOKEN | DYNAMIC),
}
TWO_RANKS = {
    "dp2": ([], {}),
    "dp2 balanced": ([], {**DYNAMIC, "balance_data": True}),
    "dp2 overlapped": (OVERLAPPED, {}),
    "tp2 in small chunks": (TP2, {**DYNAMIC, "log_probs_chunk_size": 5}),
    "tp2 with sequence parallelism": ([*TP2, "--sequence-parallel"], DYNAMIC),
    "pp2": (PP2, {}),
    "pp2 with two virtual stages": ([*PP2, "--num-layers-per-virtual-pipeline-stage", "1"], {}),
    "cp2": (["--context-parallel-size", "2"], DYNAMIC),
    "cp2 gathering keys and values": (["--context-parallel-size", "2"], DYNAMIC | {"allgather_cp": True}),
    "per token, dp2": ([], PER_TOKEN),
    "per token, cp2": (["--context-parallel-size", "2"], PER_TOKEN | DYNAMIC),
}

FROZEN = {"freeze_params_name_list": ["embedding", r"layers\.[03]\."]}
FROZEN_IN_LAYOUTS = {
    "frozen, pp2": (PP2, FROZEN),
    "frozen, pp2 with two virtual stages, recomputed": (
        [*PP2, "--num-layers-per-virtual-pipeline-stage", "1", *RECOMPUTE],
        FROZEN,
    ),
}

TIED = {
    "whole logits": ([], WHOLE_LOGITS),
    "dp2": ([], {}),
    "dp2 overlapped": (OVERLAPPED, {}),
    "pp2 overlapped": ([*PP2, *OVERLAPPED], {}),
    "tp2 with sequence parallelism": ([*TP2, "--sequence-parallel"], {}),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return str(make_tiny_model("qwen3", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def one_rank(hf):
    return run_ranks(run_layouts, 1, hf, ONE_RANK | {"frozen": ([], FROZEN)})[0]


@pytest.fixture(scope="module")
def two_ranks(hf):
    return run_ranks(run_layouts, 2, hf, TWO_RANKS | FROZEN_IN_LAYOUTS)[0]


@pytest.fixture(scope="module")
def initial(hf):
    from safetensors.numpy import load_file

    return load_file(f"{hf}/model.safetensors")


def assert_same_training(result, reference, initial, tolerance=1e-5):
    """Metrics relative to their size, or to the resolution of the log-probs (about 6) that some are differences of.

    Weights relative to the largest change of their tensor since the start, and to their own resolution: each of the
    four updates rounds a weight by up to 6e-8 of it.
    """
    (metrics, weights), (expected_metrics, expected_weights) = result, reference
    for rollout, expected in zip(metrics, expected_metrics, strict=True):
        assert rollout.keys() == expected.keys()
        for key, value in expected.items():
            assert rollout[key] == pytest.approx(value, rel=tolerance, abs=1e-6), key
    assert weights.keys() == expected_weights.keys() == initial.keys()
    for name, expected in expected_weights.items():
        change = np.abs(expected - initial[name]).max()
        assert change > 0, f"{name} was not trained"
        assert np.abs(weights[name] - expected).max() <= tolerance * change + 2.4e-7 * np.abs(expected).max(), name


def reference_of(name):
    return "per-token reference" if name.startswith("per token") else "reference"


@pytest.mark.parametrize("name", [name for name in ONE_RANK if "reference" not in name])
def test_cutting_the_batch_differently_changes_nothing(one_rank, initial, name):
    assert_same_training(one_rank[name], one_rank[reference_of(name)], initial)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_spreading_over_two_ranks_changes_nothing(one_rank, two_ranks, initial, name):
    assert_same_training(two_ranks[name], one_rank[reference_of(name)], initial)


@pytest.mark.parametrize("name", FROZEN_IN_LAYOUTS)
def test_a_list_of_frozen_layers_means_the_same_on_every_stage(one_rank, two_ranks, initial, name):
    """Layers have their numbers in the whole model; counted from each stage's first, other ones would be frozen."""
    weights, expected = two_ranks[name][1], one_rank["frozen"][1]
    moved = {key for key in initial if not np.array_equal(expected[key], initial[key])}
    assert {int(key.split(".")[2]) for key in moved if ".layers." in key} == {1, 2}
    assert moved == {key for key in initial if not np.array_equal(weights[key], initial[key])}
    for key in moved:
        change = np.abs(expected[key] - initial[key]).max()
        assert np.abs(weights[key] - expected[key]).max() <= 1e-5 * change + 2.4e-7 * np.abs(expected[key]).max(), key


def test_a_tied_embedding_gets_both_of_its_gradients(tmp_path):
    """The embedding's own and the head's, which is added to the buffer of gradients without autograd seeing it."""
    from safetensors.numpy import load_file

    path = make_tiny_model("qwen3_tied", tmp_path)
    results = run_ranks(run_layouts, 2, str(path), TIED, "qwen3_tied")[0]
    for name in TIED:
        assert_same_training(results[name], results["whole logits"], load_file(path / "model.safetensors"))


def test_every_term_of_the_loss_took_part(one_rank):
    """The comparison above would be empty if the KL, entropy or off-policy terms were zero."""
    for metrics, _ in (one_rank["reference"], one_rank["per-token reference"]):
        second = metrics[1]
        assert second["train/kl_loss"] > 1e-4
        assert second["train/entropy_loss"] > 1
        assert abs(second["train/ppo_kl"]) > 1e-6
        assert second["train/train_rollout_logprob_abs_diff"] > 0.1
    assert one_rank["reference"][0][0]["train/loss"] != one_rank["per-token reference"][0][0]["train/loss"]
