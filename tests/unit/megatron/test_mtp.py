"""Multi-token prediction: the layer computes what its formulas say, and trains the same in every layout."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file

from tests.helpers import mtp_runs
from tests.helpers.gloo import run_ranks
from tests.helpers.mtp_reference import PREFIX, make_tiny_mtp_model

FAMILIES = ("glm4_moe", "deepseek_v3", "glm_moe_dsa", "qwen2")
PER_TOKEN = {"calculate_per_token_loss": True}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EP2 = ("--expert-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")

ONE_RANK = {
    "glm4_moe": ("glm4_moe", (), {}),
    "glm4_moe: packed by tokens": ("glm4_moe", (), DYNAMIC | {"data_pad_size_multiplier": 16}),
    "glm4_moe: recompute": ("glm4_moe", RECOMPUTE, {}),
    "glm4_moe: a loud loss": ("glm4_moe", (), {"mtp_loss_scaling_factor": 2.0}),
    "glm4_moe: a silent loss": ("glm4_moe", (), {"mtp_loss_scaling_factor": 0.0}),
    "glm4_moe, frozen": ("glm4_moe", (), {"enable_mtp_training": False}),
    "glm4_moe, clipped": ("glm4_moe", (), {"clip_grad": 0.5}),
    "glm4_moe, clipped: frozen": ("glm4_moe", (), {"clip_grad": 0.5, "enable_mtp_training": False}),
    "glm4_moe per token": ("glm4_moe", (), PER_TOKEN),
    "glm4_moe per token: packed by tokens": ("glm4_moe", (), PER_TOKEN | DYNAMIC),
    "glm4_moe: bf16": ("glm4_moe", (), {"bf16": True}),
    "deepseek_v3": ("deepseek_v3", (), {}),
    "glm_moe_dsa": ("glm_moe_dsa", (), {}),
    "mimo": ("mimo", (), {}),
    "glm_moe_dsa_once": ("glm_moe_dsa_once", mtp_runs.repeated(3), {}),
    "glm_moe_dsa_once: recompute": ("glm_moe_dsa_once", (*mtp_runs.repeated(3), *RECOMPUTE), {}),
}
TWO_RANKS = {
    "glm4_moe: dp2": ("glm4_moe", (), {}),
    "glm4_moe: dp2 overlapped": ("glm4_moe", ("--overlap-grad-reduce", "--overlap-param-gather"), {}),
    "glm4_moe: ep2": ("glm4_moe", EP2, DYNAMIC),
    "glm4_moe: tp2 with sequence parallelism": ("glm4_moe", (*TP2, "--expert-tensor-parallel-size", "1"), DYNAMIC),
    "glm4_moe: pp2": ("glm4_moe", PP2, {}),
    "glm4_moe, frozen: pp2": ("glm4_moe", PP2, {"enable_mtp_training": False}),
    "glm4_moe: pp2, two virtual stages": ("glm4_moe", (*PP2, "--num-layers-per-virtual-pipeline-stage", "1"), {}),
    "glm4_moe: cp2": ("glm4_moe", CP2, DYNAMIC),
    "glm4_moe per token: cp2": ("glm4_moe", CP2, PER_TOKEN | DYNAMIC),
    "deepseek_v3: tp2 ep2": ("deepseek_v3", (*TP2, *EP2, "--expert-tensor-parallel-size", "1"), {}),
    "deepseek_v3: cp2": ("deepseek_v3", CP2, DYNAMIC),
    "glm_moe_dsa: pp2": ("glm_moe_dsa", PP2, {}),
    "glm_moe_dsa: cp2": ("glm_moe_dsa", CP2, {}),
    "mimo: tp2": ("mimo", TP2, {}),
    "glm_moe_dsa_once: cp2": ("glm_moe_dsa_once", (*mtp_runs.repeated(3), *CP2), {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> directory; _once: a layer that repeats keeps the choice of tokens of its first run."""
    directory = tmp_path_factory.mktemp("hf")
    found = {}
    for name in FAMILIES:
        (directory / name).mkdir()
        found[name] = make_tiny_mtp_model(name, directory / name)
    (directory / "once").mkdir()
    once = {"index_share_for_mtp_iteration": True}
    found["glm_moe_dsa_once"] = make_tiny_mtp_model("glm_moe_dsa", directory / "once", **once)
    return found


@pytest.fixture(scope="module")
def paths(models, tmp_path_factory):
    """name -> (tiny model whose flags describe it, directory); MiMo is a Qwen2 with other names."""
    mimo = tmp_path_factory.mktemp("mimo") / "qwen2"
    mimo.mkdir()
    config = (models["qwen2"] / "config.json").read_text()
    (mimo / "config.json").write_text(config.replace('"model_type": "qwen2"', '"model_type": "mimo"'))
    weights = mtp_runs.as_mimo(load_tensors(models["qwen2"] / "model.safetensors"))
    save_file(weights, mimo / "model.safetensors", metadata={"format": "pt"})
    found = {name: (name.removesuffix("_once"), path) for name, path in models.items() if name != "qwen2"}
    return found | {"mimo": ("qwen2", mimo)}


def runs_of(table, paths):
    return {key: (*paths[name], flags, values) for key, (name, flags, values) in table.items()}


@pytest.fixture(scope="module")
def one_rank(paths, models, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("scratch")
    formulas = {name: (*where, models.get(name, models["qwen2"])) for name, where in paths.items()}
    return run_ranks(mtp_runs.formulas_and_training, 1, formulas, scratch, runs_of(ONE_RANK, paths))[0]


@pytest.fixture(scope="module")
def two_ranks(paths):
    return run_ranks(mtp_runs.train, 2, runs_of(TWO_RANKS, paths))[0]


def initial(paths, key):
    return load_file(paths[key.split(":")[0].split()[0].rstrip(",")][1] / "model.safetensors")


def is_prediction(name):
    return name.startswith((PREFIX, mtp_runs.MIMO))


def assert_same_training(result, expected, start, tolerance=1e-5):
    """Metrics relative to their size; weights to the largest change of their tensor, and to their own resolution."""
    (metrics, weights), (wanted, wanted_weights) = result, expected
    assert metrics.keys() >= wanted.keys()
    for key, value in wanted.items():
        assert metrics[key] == pytest.approx(value, rel=tolerance, abs=1e-6), key
    assert weights.keys() == wanted_weights.keys() == start.keys()
    for name, tensor in wanted_weights.items():
        change = np.abs(tensor - start[name]).max()
        assert np.abs(weights[name] - tensor).max() <= tolerance * change + 2.4e-7 * np.abs(tensor).max(), name


def test_loss_and_gradients_equal_the_formulas(one_rank):
    """Asserted in the rank, for every family: `against_the_formulas` and `depths_equal_plain_loops` of
    tests/helpers/mtp_runs.py."""


@pytest.mark.parametrize("key", [key for key in ONE_RANK if key.endswith(("tokens", "recompute"))])
def test_cutting_the_batch_differently_changes_nothing(one_rank, paths, key):
    assert_same_training(one_rank[key], one_rank[key.split(":")[0]], initial(paths, key))


@pytest.mark.parametrize("key", TWO_RANKS)
def test_spreading_over_two_ranks_changes_nothing(one_rank, two_ranks, paths, key):
    assert_same_training(two_ranks[key], one_rank[key.split(":")[0]], initial(paths, key))


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("glm4_moe", "glm4_moe, frozen"),
        ("glm4_moe: a loud loss", "glm4_moe, frozen"),
        ("glm4_moe, clipped", "glm4_moe, clipped: frozen"),
    ],
)
def test_the_policy_trains_as_without_prediction_bit_by_bit(one_rank, key, other):
    """Embedding, decoder and head get nothing from the prediction loss, however loud; nor does clipping tie them."""
    (metrics, weights), (frozen_metrics, frozen) = one_rank[key], one_rank[other]
    for name, tensor in frozen.items():
        assert is_prediction(name) or np.array_equal(weights[name], tensor), name
    for name, value in frozen_metrics.items():
        assert metrics[name] == value, name
    assert not any("mtp" in name for name in frozen_metrics)


def test_only_training_changes_the_prediction_layer(one_rank, paths):
    start = initial(paths, "glm4_moe")
    for key in ("glm4_moe, frozen", "glm4_moe, clipped: frozen"):
        weights = one_rank[key][1]
        assert all(np.array_equal(weights[name], start[name]) for name in start if is_prediction(name)), key
    _, trained = one_rank["glm4_moe"]
    changed = {name for name in start if is_prediction(name) and not np.array_equal(trained[name], start[name])}
    assert one_rank["glm4_moe"][0].keys() >= {"train/mtp_loss", "train/mtp_1_loss"}
    dense = {name for name in start if is_prediction(name) and ".experts." not in name and "correction" not in name}
    assert changed >= dense and any(".experts." in name for name in changed)


def test_it_learns_a_batch_by_heart(one_rank):
    losses = one_rank["learnt"]
    assert losses[0] > 4 and losses[-1] < 0.6 * losses[0] and losses == sorted(losses, reverse=True), losses


def test_half_precision_is_near(one_rank):
    whole, half = (one_rank[key][0]["train/mtp_loss"] for key in ("glm4_moe", "glm4_moe: bf16"))
    assert whole != half == pytest.approx(whole, rel=0.01)


def test_a_checkpoint_holds_the_layer_and_its_optimizer(one_rank):
    (expected, wanted), (metrics, weights) = one_rank["resumed"]
    assert metrics == expected
    assert all(np.array_equal(weights[name], tensor) for name, tensor in wanted.items())


def test_a_checkpoint_without_the_layer_is_named(one_rank):
    said = one_rank["refused"]
    assert "iter_0000000 has no multi-token-prediction layers" in said and "again with --mtp-num-layers 1" in said


def test_the_factor_scales_the_gradient(one_rank, paths):
    """With Adam's epsilon at 1 an update is nearly proportional to its gradient; a factor of 0 leaves the decay, which
    takes lr * decay = 0.03 of a weight in each of the two steps."""
    name = PREFIX + "eh_proj.weight"
    silent, plain, loud = (one_rank[f"glm4_moe{of}"][1][name] for of in (": a silent loss", "", ": a loud loss"))
    assert np.abs(silent - initial(paths, "glm4_moe")[name] * 0.97**2).max() < 1e-6
    small, large = np.abs(plain - silent).max(), np.abs(loud - silent).max()
    assert small > 1e-3 and 7 < large / small < 11


def test_gradients_are_clipped_apart(one_rank):
    metrics = one_rank["glm4_moe, clipped"][0]
    assert metrics["train/mtp_grad_norm"] > 0
    assert metrics["train/grad_norm"] == one_rank["glm4_moe, clipped: frozen"][0]["train/grad_norm"] > 0.5
