"""Model families with layers of their own: Megatron's numbers against transformers', in every parallel layout."""

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.family_runs import (
    LAYOUTS,
    LENGTHS,
    families_in_layouts,
    reference,
    with_prediction_layer,
    with_vision_tower,
)
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_models import make_tiny_model

# layouts that touch what a family has of its own
FAMILIES = {
    "qwen3_next": ("tp", "plain", "cp", "pp", "ep", "recompute"),
    "qwen3_5": ("tp", "plain", "cp"),
    "qwen3_5_moe": ("tp", "plain"),
    "minimax_m2": ("tp", "plain"),
    "glm4": ("tp", "plain", "pp"),
}
# (family, flags, words of the answer)
REFUSED = (
    ("qwen3_5", ("--tensor-model-parallel-size", "2"), ("--tensor-model-parallel-size 2", "--sequence-parallel")),
    ("qwen3_5", ("--deterministic-mode",), ("--deterministic-mode",)),
    ("qwen3_5", ("--linear-num-key-heads", "3", "--context-parallel-size", "2"), ("--linear-num-key-heads 3", "cp 2")),
    ("qwen3_5", ("--linear-num-key-heads", "4"), ("--linear-num-value-heads 6", "--linear-num-key-heads 4")),
    (
        "minimax_m2",
        ("--num-query-groups", "1", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        ("--tensor-model-parallel-size 2", "--num-query-groups 1"),
    ),
    ("minimax_m2", ("--apply-layernorm-1p",), ("--apply-layernorm-1p",)),
)
RUNS = [(name, layout) for name, layouts in FAMILIES.items() for layout in layouts]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("families")
    return {name: make_tiny_model(name, directory) for name in FAMILIES}


@pytest.fixture(scope="module")
def references(paths):
    return {name: reference(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def found(paths):
    """All families in all layouts on two ranks, in one start of Megatron."""
    runs = [(name, paths[name], layout) for name, layout in RUNS]
    vision = with_vision_tower(paths["qwen3_5_moe"], paths["qwen3_5_moe"].parent / "vision")
    predicting = with_prediction_layer(paths["qwen3_next"], paths["qwen3_next"].parent / "predicting")
    round_trips = {
        "vision": ("qwen3_5_moe", vision, LAYOUTS["tp"]),
        "prediction": ("qwen3_next", predicting, ("--mtp-num-layers", "1")),
    }
    refused = [(name, paths[name], flags) for name, flags, _ in REFUSED]
    return run_ranks(families_in_layouts, 2, runs, round_trips, refused)[0]


@pytest.mark.parametrize(("name", "layout"), [run for run in RUNS if run[1] in ("plain", "tp")])
def test_packed_logits(found, references, name, layout):
    """Three ragged sequences in one row, one longer than a chunk of the delta rule, one shorter than its kernel."""
    torch.testing.assert_close(found[name, layout]["logits"], references[name]["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_unpacked_logits(found, references, name):
    """A plain batch: its first row is the first sequence of the pack, its second row differs."""
    first, second = found[name, "plain"]["unpacked"]
    torch.testing.assert_close(first, references[name]["logits"][: LENGTHS[0]], rtol=0, atol=1e-4)
    assert (second - first).abs().max() > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_neighbours_in_a_pack_do_not_matter(found, name):
    """Convolution and state of a delta net run over a row: they must start anew at each sequence."""
    same = found[name, "plain"]["logits"][-LENGTHS[-1] :]
    torch.testing.assert_close(found[name, "plain"]["other neighbours"], same, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_loss_and_gradients(found, references, name, layout):
    """Every gradient, by its name in the checkpoint. A replicated weight whose partial gradients were not added up,
    or a wrongly cut shard, would show here."""
    got, expected = found[name, layout], references[name]
    assert sum(got["loss"]) == pytest.approx(expected["loss"] * (len(got["loss"]) if layout != "cp" else 1), rel=1e-5)
    for key, gradient in expected["gradients"].items():
        if key.endswith("e_score_correction_bias"):
            continue
        scale = float(gradient.abs().max())
        difference = float((got["gradients"][key] - gradient).abs().max())
        assert scale > 0 or ".experts." in key, f"{key} has no gradient"
        assert difference <= 1e-4 * scale + 1e-7, f"{key}: {difference:.2e} of {scale:.2e}"


@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_round_trip(found, paths, name, layout):
    """Checkpoint -> Megatron's shards -> checkpoint: the same names and bits."""
    expected = load_file(paths[name] / "model.safetensors")
    assert found[name, layout]["weights"].keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[name, layout]["weights"][key], tensor), key


@pytest.mark.parametrize("name", FAMILIES)
def test_distributed_checkpoint(found, paths, name):
    """Written by two tensor-parallel ranks, read by one: what a family shards for itself must say how."""
    expected = load_file(paths[name] / "model.safetensors")
    assert found[name, "plain"]["resharded"].keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[name, "plain"]["resharded"][key], tensor), key


def test_published_qwen3_5(found, paths):
    """Experts packed by layer are read slice by slice, the vision tower and the prediction layer passed over; experts
    leave one by one, under the names of the language model inside."""
    expected = load_file(paths["qwen3_5_moe"] / "model.safetensors")
    inner = {
        name if name == "lm_head.weight" else name.replace("model.", "model.language_model.", 1): t
        for name, t in expected.items()
    }
    assert found["vision"].keys() == inner.keys()
    assert all(torch.equal(found["vision"][name], tensor) for name, tensor in inner.items())


def test_prediction_layer(found, paths):
    """Loaded and written back with the model, when it is asked for: gated attention and experts, names of its own."""
    expected = load_file(paths["qwen3_next"].parent / "predicting" / "model.safetensors")
    assert found["prediction"].keys() == expected.keys()
    assert all(torch.equal(found["prediction"][name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals_name_the_flags(found, case):
    """Configurations that would compute another function, or gradients that are not added up."""
    for words in REFUSED[case][2]:
        assert words in found["refused"][case]
