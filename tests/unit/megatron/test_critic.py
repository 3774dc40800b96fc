"""A critic on one rank (in tests/helpers/critic_checks.py), and that nothing about PPO depends on the layout."""

import numpy as np
import pytest

from tests.helpers.critic_checks import check_names, run_checks
from tests.helpers.critic_runs import run_ppo
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_models import make_tiny_model

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
PP2 = ["--pipeline-model-parallel-size", "2"]
TP2 = ["--tensor-model-parallel-size", "2"]
CP2 = ["--context-parallel-size", "2"]

ONE_RANK = {
    "reference": ([], {}),
    "per token reference": ([], {"calculate_per_token_loss": True}),
    "packed": ([], {**DYNAMIC, "recompute_loss_function": True}),
}
TWO_RANKS = {
    "dp2": ([], {}),
    "tp2": (TP2, {}),
    "tp2 with sequence parallelism": ([*TP2, "--sequence-parallel"], DYNAMIC),
    "pp2": (PP2, {}),
    "pp2 with two virtual stages": ([*PP2, "--num-layers-per-virtual-pipeline-stage", "1"], {}),
    "cp2": (CP2, DYNAMIC),
    "per token cp2": (CP2, {"calculate_per_token_loss": True}),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return str(make_tiny_model("qwen3", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def one_process(hf, tmp_path_factory):
    """(tracebacks of the checks, results of the layouts of one rank)."""
    return run_ranks(_one_process, 1, hf, str(tmp_path_factory.mktemp("one")))[0]


@pytest.fixture(scope="module")
def two_ranks(hf, tmp_path_factory):
    return run_ranks(run_ppo, 2, hf, str(tmp_path_factory.mktemp("two")), TWO_RANKS)[0]


def _one_process(rank, world_size, hf, scratch):
    return run_checks(rank, world_size, hf, scratch), run_ppo(rank, world_size, hf, scratch, ONE_RANK)


@pytest.mark.parametrize("name", check_names())
def test_one_rank(one_process, name):
    if traceback := one_process[0][name]:
        pytest.fail(traceback, pytrace=False)


@pytest.mark.parametrize("name", [name for name in ONE_RANK if "reference" not in name])
def test_cutting_the_batch_differently_changes_nothing(one_process, name):
    assert_same(one_process[1][name], one_process[1]["reference"])


@pytest.mark.parametrize("name", TWO_RANKS)
def test_spreading_over_two_ranks_changes_nothing(one_process, two_ranks, name):
    reference = "per token reference" if name.startswith("per token") else "reference"
    assert_same(two_ranks[name], one_process[1][reference])


def test_every_part_took_part(one_process):
    """The comparisons above would be empty without clipped values, or if the actor did not read the values."""
    critic, _, actor, _ = one_process[1]["reference"]
    assert 0 < critic[1]["train/critic-value_clipfrac"] <= 1 and critic[0]["train/critic-value_loss"] > 0.1
    assert actor[0]["rollout/values"] == critic[0]["rollout/values"] != actor[1]["rollout/values"]
    assert actor[1]["rollout/kl"] != 0 and actor[1]["rollout/returns"] != critic[1]["rollout/returns"]


def assert_same(result, reference, tolerance=1e-5):
    """Metrics of both roles relative to their size; weights relative to their tensor's largest, since each of four
    updates moves them by about as much as they are."""
    for metrics, expected_metrics in zip(result[0] + result[2], reference[0] + reference[2], strict=True):
        assert metrics.keys() == expected_metrics.keys()
        for key, value in expected_metrics.items():
            assert metrics[key] == pytest.approx(value, rel=tolerance, abs=2e-6), key
    for weights, expected_weights in ((result[1], reference[1]), (result[3], reference[3])):
        assert weights.keys() == expected_weights.keys()
        for name, expected in expected_weights.items():
            assert np.abs(weights[name] - expected).max() <= tolerance * np.abs(expected).max(), name
