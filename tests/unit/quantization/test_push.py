"""Trained weights for a quantised --hf-checkpoint: engines receive the bytes that the quantising tool would write."""

import json
from argparse import Namespace
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.megatron_utils.megatron_to_hf.processors.directories import quantize_directory
from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8
from slime.backends.megatron_utils.update_weight import _check_scales, choose_updater
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.gloo import run_ranks
from tests.helpers.quantised_push import TRANSPORTS
from tests.helpers.tiny_models import make_tiny_model
from tests.unit.quantization.test_convert_checkpoint import same_tensors

# name -> (tiny model, format, modules that stay as they are, layout); no side is a multiple of the blocks
CASES = {
    "qwen3_moe": (BlockFp8((16, 32)), ("layers.1.self_attn",), ("--expert-model-parallel-size", "2")),
    "deepseek_v3": (BlockFp8((32, 16), power_of_two=True), (), ("--tensor-model-parallel-size", "2")),
    "qwen3_tied": (BlockFp8(), ("mlp",), ("--pipeline-model-parallel-size", "2")),
}


class RecordingEngine(FakeEngine):
    """Also keeps the names that came together."""

    def __init__(self):
        super().__init__()
        self.requests: list[set[str]] = []

    def answer(self, endpoint, body):
        before = dict(self.weights)
        super().answer(endpoint, body)
        changed = {name for name, tensor in self.weights.items() if before.get(name) is not tensor}
        if endpoint.startswith("update_weights"):
            self.requests.append(changed)


def _push(rank, world_size, root, urls):
    from slime.utils.engine_client import EngineInfo
    from tests.helpers.bridge_runs import built, load

    for name, (_, _, flags) in CASES.items():
        with built(rank, world_size, name, root / name, flags) as (args, chunks):
            load(args, chunks, root / name)
            for transport, chosen in TRANSPORTS.items():
                own = {"hf_checkpoint": str(root / "served" / name), "update_weight_disk_dir": str(root / "disk")}
                # one byte: what is not bound to come together comes apart
                own |= {"update_weight_buffer_size": 1, "update_weight_disk_keep_files": False}
                own |= {"update_weight_transport": "nccl", "update_weight_mode": "full"} | chosen
                updater = choose_updater(Namespace(**(vars(args) | own)), chunks)
                updater.connect([EngineInfo(urls[name, transport], 0, 1, 0)])
                updater.update_weights()
                updater.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """({(model, transport): engine after the push}, {model: tensors of the quantised directory})."""
    root = tmp_path_factory.mktemp("push")
    for name, (format, ignore, _) in CASES.items():
        quantize_directory(make_tiny_model(name, root), root / "served" / name, format, ignore)
    with ExitStack() as stack:
        places = [(name, transport) for name in CASES for transport in TRANSPORTS]
        found = {place: stack.enter_context(RecordingEngine()) for place in places}
        run_ranks(_push, 2, root, {place: engine.url for place, engine in found.items()})
    return found, {name: load_file(root / "served" / name / "model.safetensors") for name in CASES}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CASES)
def test_engines_receive_what_the_tool_writes(engines, name, transport):
    """Blocks lie over the whole matrix, not over the shard of a rank, and a rule of the config keeps its modules."""
    found, wanted = engines
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in wanted[name].values())
    assert same_tensors(found[name, transport].weights, wanted[name])


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
@pytest.mark.parametrize("name", CASES)
def test_a_weight_and_its_scales_come_together(engines, name, transport):
    """SGLang derives matrices of latent attention as soon as kv_b_proj arrives: with the scales of the update before,
    they would be wrong until the next one. What it fuses must come together, too, with all scales."""
    requests, wanted = engines[0][name, transport].requests, engines[1][name]
    assert len(requests) > 30
    for names in requests:
        for key in names:
            scale = key.removesuffix("_scale_inv").removesuffix(".weight") + ".weight_scale_inv"
            assert scale not in wanted or {scale, scale.removesuffix("_scale_inv")} <= names, key
            assert "q_a_proj" not in key or key.replace("q_a_proj", "kv_a_proj_with_mqa") in names, key


def test_blackwell_needs_kernels_that_leave_the_scales_alone(tmp_path, monkeypatch):
    """Refused with both flags before a push, and settled by them. Unquantised weights are not concerned."""
    config = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = {
        "hf_checkpoint": str(tmp_path),
        "accelerator": "cuda",
        "sglang_overrides": {},
        "update_weight_mode": "full",
    }
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(ValueError, match="--sglang-fp8-gemm-backend triton --sglang-moe-runner-backend triton"):
        choose_updater(Namespace(**args), [])
    chosen = {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "triton"}
    _check_scales(Namespace(**args | {"sglang_overrides": chosen}))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    _check_scales(Namespace(**args))
