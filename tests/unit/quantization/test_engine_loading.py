"""What reads the checkpoints: SGLang's own loader, and transformers. Both must hold exactly the weights we wrote."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from slime.backends.megatron_utils.megatron_to_hf.processors.directories import dequantize_directory
from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8, ChannelFp8, TensorFp8
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4
from tests.helpers.sglang_load import ROOT, loader_env
from tests.helpers.tiny_models import make_tiny_model
from tests.unit.quantization.test_convert_checkpoint import quantise, same_tensors, tensors_of

FORMATS = {
    "block": (BlockFp8(), ()),
    "ue8m0": (BlockFp8(power_of_two=True), ()),
    "channel": (ChannelFp8(), ()),
    "tensor": (TensorFp8(), ()),
    "int4": (PackedInt4(32), None),
    "int4-mlp": (PackedInt4(64), ("self_attn",)),
    "int4-asymmetric": (PackedInt4(32, symmetric=False), ()),
}
CASES = [
    *(f"dense-{name}" for name in FORMATS if name != "int4"),
    *(f"moe-{name}" for name in FORMATS if name != "int4-asymmetric"),
]
PUSHED = ["dense-block", "moe-block", "latent-block"]
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(.+)")


@pytest.fixture(scope="module")
def quantised(checkpoints, tmp_path_factory) -> Path:
    """All cases, one directory each."""
    directory = tmp_path_factory.mktemp("quantised")
    for case in CASES:
        model, _, name = case.partition("-")
        format, ignore = FORMATS[name]
        quantise(checkpoints / model, directory / case, format, ignore)
    return directory


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> Path:
    """Two models with latent attention in FP8 blocks: `start`, `latent-block`. kv_a_proj ends within a block."""
    directory = tmp_path_factory.mktemp("latent")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"q_lora_rank": 128, "kv_lora_rank": 192, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    sizes |= {"v_head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    for seed, name in enumerate(("start", "latent-block")):
        made = make_tiny_model("deepseek_v3", directory / f"float_{seed}", seed=seed, **sizes)
        config = json.loads((made / "config.json").read_text()) | {"moe_layer_freq": 1, "topk_method": "noaux_tc"}
        (made / "config.json").write_text(json.dumps(config | {"scoring_func": "sigmoid"}))
        quantise(made, directory / name)
    return directory


@pytest.fixture(scope="module")
def loaded(quantised, latent, checkpoints, tmp_path_factory) -> Path:
    """The parameters that SGLang ends up with, a file for each case and push. One process: its imports take long."""
    out = tmp_path_factory.mktemp("loaded")
    arguments = [*(quantised / case for case in CASES), latent / "latent-block"]
    arguments.append(f"{latent / 'start'}:{latent / 'latent-block'}")
    for case in PUSHED[:-1]:
        start = tmp_path_factory.mktemp("other") / "start"
        quantise(_other(checkpoints / case.partition("-")[0], start.with_name("plain")), start)
        arguments.append(f"{start}:{quantised / case}")
    command = [sys.executable, "-m", "tests.helpers.sglang_load", out, *arguments]
    result = subprocess.run(command, env=loader_env(dict(os.environ)), cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return out


def _other(source: Path, target: Path) -> Path:
    """The same model with other weights."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = {name: (tensor * -0.7 + 0.01).contiguous() for name, tensor in tensors_of(source).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint tensors under SGLang's names: q, k, v and gate, up one above the other, experts stacked. SGLang keeps
    the INT4 parts of experts transposed."""
    rows, experts = defaultdict(list), defaultdict(lambda: defaultdict(list))
    for name in sorted(tensors, key=lambda name: name.replace("q_proj", "1").replace("v_proj", "z")):
        if match := _EXPERT.fullmatch(name):
            prefix, expert, leaf, part = match.groups()
            experts[f"{prefix}.{'w2' if leaf == 'down' else 'w13'}_{part}"][int(expert)].append(tensors[name])
        else:
            module, _, part = name.rpartition(".")
            parent, _, leaf = module.rpartition(".")
            rows[f"{parent}.{_FUSED.get(leaf, leaf)}.{part}".lstrip(".")].append(tensors[name])
    result = {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in rows.items()}
    for name, by_expert in experts.items():
        stacked = torch.stack([torch.cat(by_expert[expert]) for expert in range(len(by_expert))])
        packed = name.replace("_scale", "_packed")
        result[name] = stacked.transpose(1, 2) if packed.endswith("_packed") and packed in experts else stacked
    return result


@pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang would take the GPU; test_engines_gpu.py is for that")
@pytest.mark.parametrize("case", CASES)
def test_sglang_holds_exactly_the_checkpoint(quantised, loaded, case):
    """Every tensor has found its parameter, with its bytes; no parameter was left over. A layer that the engine takes
    for quantised and the checkpoint holds in bfloat16, or the other way round, ends here."""
    params = torch.load(loaded / f"{case}.pt")
    expected = fused(tensors_of(quantised / case))
    helpers = ("g_idx", "g_idx_sort_indices", "weight_shape")  # of GPU kernels; not read from the checkpoint
    left = {name for name in params if not name.endswith(helpers)}
    for name, tensor in expected.items():
        if name.endswith("weight_shape"):
            continue
        param = params[name]
        left.remove(name)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            param = param[: tensor.shape[0]]  # padded
        assert param.dtype == tensor.dtype, name
        raw = [t.contiguous().view(-1).view(torch.uint8) for t in (param, tensor)]
        assert torch.equal(*raw), name
    assert not left


@pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang would take the GPU; test_push_gpu.py is for that")
@pytest.mark.parametrize("case", PUSHED)
def test_a_push_leaves_what_a_start_would(loaded, case):
    """Other weights pushed into a model in buckets, a weight with its scales: every parameter, and the matrices that
    latent attention derives from kv_b_proj, have the bytes of a model that has started from them."""
    started, pushed = torch.load(loaded / f"{case}.pt"), torch.load(loaded / f"start-{case}.pt")
    assert same_tensors(started, pushed)
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in started.values())
    assert (case == "latent-block") == any(name.endswith("w_kc") for name in started)


def load(directory: Path) -> dict[str, torch.Tensor]:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("name", ["block", "ue8m0"])
def test_transformers_holds_the_dequantised_weights(quantised, tmp_path, monkeypatch, model, name):
    """Without a GPU transformers dequantises FP8 blocks itself: bit for bit as our cast to bfloat16 does."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    # transformers asks for a package that the CPU path does not use
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    dequantize_directory(quantised / f"{model}-{name}", tmp_path / "bf16")
    assert same_tensors(load(quantised / f"{model}-{name}").state_dict(), load(tmp_path / "bf16").state_dict())


@pytest.mark.parametrize("name", ["channel", "int4-mlp", "int4-asymmetric"])
def test_transformers_computes_with_compressed_tensors(quantised, tmp_path, name):
    """The logits of the compressed model are those of our cast to bfloat16. (FP8 rows: activations are quantised as
    well, so they are near, not equal.)"""
    dequantize_directory(quantised / f"dense-{name}", tmp_path / "bf16")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        compressed, plain = (
            load(path)(ids).logits.float() for path in (quantised / f"dense-{name}", tmp_path / "bf16")
        )
    error = (compressed - plain).norm() / plain.norm()
    assert error < (0.1 if name == "channel" else 1e-6)
