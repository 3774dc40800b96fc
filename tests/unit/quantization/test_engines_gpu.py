"""SGLang on a GPU computes with quantised checkpoints what transformers does with the weights they stand for.

All engines start at the same time. Run with -s to see the progress.
"""

import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.directories import (
    dequantize_directory,
    quantize_directory,
)
from tests.helpers.engines import prompt_log_probs, running_engines, say
from tests.unit.quantization.test_engine_loading import FORMATS, load

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

LENGTH = 96
# FP8 engines quantise the activations too, which the bfloat16 reference does not; INT4 engines do not.
CASES = {
    "dense-block": 0.1,
    "dense-channel": 0.1,
    "dense-tensor": 0.15,
    "dense-int4-mlp": 0.03,
    "moe-block": 0.1,
    "moe-int4": 0.03,
}


@pytest.fixture(scope="module")
def larger(checkpoints, tmp_path_factory):
    """The tiny models with weights four times as large: their logits differ enough to tell right from wrong."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("larger")
    for model in ("dense", "moe"):
        (directory / model).mkdir()
        for path in (checkpoints / model).glob("*"):
            if path.suffix == ".safetensors":
                tensors = {n: t if "norm" in n else t * 4 for n, t in load_file(path).items()}
                save_file(tensors, directory / model / path.name, metadata={"format": "pt"})
            elif path.suffix == ".json":
                (directory / model / path.name).write_text(path.read_text())
    return directory


@pytest.fixture(scope="module")
def answers(larger, tmp_path_factory) -> dict:
    """case -> (log-probs of SGLang, of transformers)."""
    directory = tmp_path_factory.mktemp("served")
    for case in CASES:
        model, _, name = case.partition("-")
        quantize_directory(larger / model, directory / case, *FORMATS[name])
        dequantize_directory(directory / case, directory / "bf16" / case)
    with running_engines({case: directory / case for case in CASES}, directory / "logs") as engines:
        said = {case: torch.tensor(prompt_log_probs(engine.url, LENGTH)) for case, engine in engines.items()}
    ids = torch.arange(3, 3 + LENGTH, device="cuda")[None]
    reference = {}
    for case in CASES:
        with torch.no_grad():
            logits = load(directory / "bf16" / case).cuda()(ids).logits[0].float()
        reference[case] = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu()
    return {case: (values, reference[case]) for case, values in said.items()}  # without those that did not come up


@pytest.mark.parametrize("case, tolerance", CASES.items())
def test_log_probs_of_the_engine(answers, case, tolerance):
    """Relative to how much log-probs differ from token to token; wrong scales or swapped parts give about 1."""
    assert case in answers, "the engine did not come up"
    engine, reference = answers[case]
    assert engine.shape == reference.shape == (LENGTH - 1,)
    error = (engine - reference).norm() / (reference - reference.mean()).norm()
    say(f"{case}: {error:.4f}")
    assert error < tolerance, f"{case}: {error:.3f}"
