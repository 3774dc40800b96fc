"""SGLang on a GPU computes with quantised checkpoints what transformers does with the weights they stand for."""

import json
import os
import subprocess
import sys

import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.directories import (
    dequantize_directory,
    quantize_directory,
)
from slime.backends.sglang_utils.server_args import SERVER_PATH
from tests.helpers.sglang_load import ROOT
from tests.unit.quantization.test_engine_loading import FORMATS, load

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

LENGTH = 96
# FP8 engines quantise the activations too, which the bfloat16 reference does not; INT4 engines do not.
CASES = {
    "dense-block": 0.1,
    "dense-ue8m0": 0.1,
    "dense-channel": 0.1,
    "dense-tensor": 0.15,
    "dense-int4-mlp": 0.03,
    "moe-block": 0.1,
    "moe-channel": 0.1,
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
    out = directory / "answers.json"
    command = [sys.executable, "-m", "tests.helpers.sglang_logprobs", out, str(LENGTH)]
    env = dict(os.environ)
    env["PYTHONPATH"] = ":".join([str(SERVER_PATH), str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    command += [directory / case for case in CASES]
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    ids = torch.arange(3, 3 + LENGTH, device="cuda")[None]
    reference = {}
    for case in CASES:
        with torch.no_grad():
            logits = load(directory / "bf16" / case).cuda()(ids).logits[0].float()
        reference[case] = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu()
    return {case: (torch.tensor(values), reference[case]) for case, values in json.loads(out.read_text()).items()}


@pytest.mark.parametrize("case, tolerance", CASES.items())
def test_log_probs_of_the_engine(answers, case, tolerance):
    """Relative to how much log-probs differ from token to token; wrong scales or swapped parts give about 1."""
    engine, reference = answers[case]
    assert engine.shape == reference.shape == (LENGTH - 1,)
    error = (engine - reference).norm() / (reference - reference.mean()).norm()
    assert error < tolerance, f"{case}: {error:.3f}"
