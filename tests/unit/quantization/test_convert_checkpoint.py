"""Whole directories: complete or not there, continued after a kill, and never in place of something good."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.megatron_to_hf.processors.checkpoint import QuantizeRule
from slime.backends.megatron_utils.megatron_to_hf.processors.directories import (
    dequantize_directory,
    quantize_directory,
)
from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8, ChannelFp8, TensorFp8
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4
from slime.utils import convert_checkpoint as convert_checkpoint_module
from slime.utils import safetensors_io as io
from slime.utils.safetensors_io import INDEX, CheckpointDirectory, CheckpointError
from tests.unit.quantization.test_safetensors_io import largest_file

ROOT = Path(__file__).resolve().parents[3]


def quantise(source: Path, target: Path, format=None, ignore=(), **options):
    return quantize_directory(source, target, format or BlockFp8(), ignore, **options)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the directory, read by the safetensors library through the index, which must name each."""
    index = json.loads((directory / INDEX).read_text())
    files = {file: load_file(directory / file) for file in set(index["weight_map"].values())}
    assert {name for tensors in files.values() for name in tensors} == index["weight_map"].keys()
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    raw = lambda tensor: tensor.contiguous().view(-1).view(torch.uint8)  # noqa: E731
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(raw(a[n]), raw(b[n])) for n in a)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("format", [BlockFp8(), ChannelFp8(), TensorFp8(), PackedInt4(32)], ids=str)
def test_quantised_directory_and_back(checkpoints, tmp_path, format, workers):
    """Every tensor is the format's, or untouched; casting back gives the dequantised weights under the old names."""
    source = tensors_of(checkpoints / "moe")
    ignore = None if isinstance(format, PackedInt4) else ()
    quantise(checkpoints / "moe", tmp_path / "q", format, ignore, max_workers=workers)
    expected, restored = {}, {}
    for name, tensor in source.items():
        linear = name.endswith("_proj.weight") and (ignore is not None or ".experts." in name)
        parts = format.quantize(tensor) if linear else {"weight": tensor}
        expected |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        restored[name] = format.dequantize(parts) if linear else tensor
    assert len(expected) > len(source) > len([name for name in source if name not in expected or "gate.w" in name])
    assert same_tensors(tensors_of(tmp_path / "q"), expected)
    dequantize_directory(tmp_path / "q", tmp_path / "back")
    assert same_tensors(tensors_of(tmp_path / "back"), restored)
    config = json.loads((checkpoints / "moe" / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_the_other_files_come_along(checkpoints, tmp_path):
    """Sub-directories and a tokenizer that looks like weights were once left behind."""
    quantise(checkpoints / "dense", tmp_path / "out")
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    shards = {path.name for path in (checkpoints / "dense").glob("*.safetensors")}
    assert len(shards) > 3
    assert names == shards | {
        INDEX,
        "config.json",
        "generation_config.json",
        "tokenizer.bin",
        "figures",
        "figures/chat.jinja",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_output_is_replaced_by_force_alone_and_only_when_complete(checkpoints, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "good").touch()
    with pytest.raises(CheckpointError, match="out exists; .*--force"):
        quantise(checkpoints / "dense", target)
    with largest_file(200_000), pytest.raises(CheckpointError, match="cannot write .*File too large"):
        quantise(checkpoints / "dense", target, force=True)
    assert (target / "good").exists(), "a full disk must not cost the older output"
    summary = quantise(checkpoints / "dense", target, force=True)
    assert not (target / "good").exists() and len(tensors_of(target)) == summary.tensors


@pytest.mark.parametrize("where", ["", "inside"])
def test_the_output_must_not_be_the_input(checkpoints, where):
    with pytest.raises(CheckpointError, match="must lie outside the input"):
        quantise(checkpoints / "dense", checkpoints / "dense" / where, force=True)


def test_too_little_space_is_said_before_any_work(checkpoints, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs 2\.\d MB more, .* has 1\.0 MB free"):
        quantise(checkpoints / "dense", tmp_path / "out")
    assert not list(tmp_path.glob("out.partial-*/*"))


@contextmanager
def failing_after(files: int):
    """The disk refuses when so many files are written."""
    written = []

    def write_file(path, infos, tensors):
        if len(written) == files:
            raise CheckpointError(f"cannot write {path}: No space left on device")
        written.append(path)
        return io.write_file(path, infos, tensors)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(convert_checkpoint_module, "io", SimpleNamespace(**vars(io) | {"write_file": write_file}))
        yield


def test_a_failure_is_continued_and_done_files_are_not_done_again(checkpoints, tmp_path):
    """Two files are finished, the third fails; the next call takes the two over, bytes and time stamps."""
    with failing_after(2):
        quantise(checkpoints / "dense", tmp_path / "out")
    (partial,) = tmp_path.iterdir()
    done = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert len(done) == 2 and re.fullmatch(r"out\.partial-[0-9a-f]{12}", partial.name)
    assert not list(partial.glob("*.tmp"))
    summary = quantise(checkpoints / "dense", tmp_path / "out")
    assert summary.files_kept == 2 and summary.files > 0
    now = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert now.items() >= done.items()
    quantise(checkpoints / "dense", tmp_path / "fresh")
    assert same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "fresh"))


def test_nothing_is_taken_over_from_another_conversion(checkpoints, tmp_path, caplog):
    with failing_after(1):
        quantise(checkpoints / "dense", tmp_path / "out")
    summary = quantise(checkpoints / "dense", tmp_path / "out", BlockFp8(power_of_two=True))
    assert summary.files_kept == 0
    assert "is the rest of another conversion" in caplog.text


def test_a_damaged_file_of_the_partial_directory_is_written_again(checkpoints, tmp_path):
    with failing_after(1):
        quantise(checkpoints / "dense", tmp_path / "out")
    (partial,) = tmp_path.iterdir()
    first = next(partial.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    assert quantise(checkpoints / "dense", tmp_path / "out").complete
    tensors_of(tmp_path / "out")


def test_a_killed_conversion_leaves_no_output_and_continues(checkpoints, tmp_path):
    """kill -9 in the middle: no output directory, complete files in the partial one, the same result afterwards."""
    source, target = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text("{}")
    for layer in range(24):
        weight = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(layer)).bfloat16()
        save_file({f"layers.{layer}.mlp.up_proj.weight": weight}, source / f"model-{layer:05d}.safetensors")
    command = [sys.executable, ROOT / "tools" / "convert_hf_to_fp8.py", "--model-dir", source, "--save-dir", target]
    process = subprocess.Popen([*command, "--max-workers", "1"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out.partial-*/*.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not target.exists(), "killed too late to say anything"
    assert quantise(source, target).files_kept >= 1
    assert not list(tmp_path.glob("*/*.tmp"))
    for name, weight in CheckpointDirectory(source).weight_map.items():
        expected = BlockFp8().quantize(load_file(source / weight)[name])
        assert torch.equal(load_file(target / weight)[name].view(torch.uint8), expected["weight"].view(torch.uint8))


def test_several_calls_may_share_the_files(checkpoints, tmp_path):
    quantise(checkpoints / "dense", tmp_path / "whole", PackedInt4(32))
    files = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    first = dequantize_directory(tmp_path / "whole", tmp_path / "out", only=files[:2])
    assert not first.complete and not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="no weight file other"):
        dequantize_directory(tmp_path / "whole", tmp_path / "out", only=["other"])
    assert dequantize_directory(tmp_path / "whole", tmp_path / "out", only=files[2:]).complete
    assert tensors_of(tmp_path / "out").keys() == tensors_of(checkpoints / "dense").keys()


def write(directory: Path, config: dict, **files: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file(tensors, directory / f"{name}.safetensors")
    return directory


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def test_scales_may_lie_in_another_file(tmp_path):
    """Large checkpoints are cut between a weight and its scale."""
    weight = torch.randn(130, 200)
    parts = BlockFp8().quantize(weight)
    files = {"one": {WEIGHT: parts["weight"]}, "two": {WEIGHT + "_scale_inv": parts["weight_scale_inv"]}}
    dequantize_directory(write(tmp_path / "q", FP8, **files), tmp_path / "out")
    assert same_tensors(tensors_of(tmp_path / "out"), {WEIGHT: BlockFp8().dequantize(parts)})
    assert not (tmp_path / "out" / "two.safetensors").exists()


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({WEIGHT: torch.zeros(2, 2).to(torch.float8_e4m3fn)}, f"there is no {WEIGHT}_scale_inv"),
        ({WEIGHT + "_scale_inv": torch.ones(1, 1)}, "belongs to no quantised weight"),
        ({WEIGHT: torch.zeros(2, 2), WEIGHT + "_scale_inv": torch.ones(1, 1)}, "belongs to no quantised weight"),
        ({"x": torch.zeros(2, 2).to(torch.float8_e5m2)}, "which the config does not describe"),
    ],
)
def test_unpaired_weights_and_scales_are_named(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        dequantize_directory(write(tmp_path / "q", FP8, one=tensors), tmp_path / "out")


def test_scales_of_a_wrong_shape_are_named(tmp_path):
    tensors = {WEIGHT: torch.zeros(130, 2).to(torch.float8_e4m3fn), WEIGHT + "_scale_inv": torch.ones(1, 1)}
    with pytest.raises(CheckpointError, match=r"up_proj: .*has 2 x 1 scales, here are \[1, 1\]"):
        dequantize_directory(write(tmp_path / "q", FP8, one=tensors), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_quantised_is_named(checkpoints, tmp_path):
    with pytest.raises(CheckpointError, match="quantised already .quant_method 'fp8'.*cast it"):
        quantise(write(tmp_path / "q", FP8, one={"a": torch.ones(1)}), tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not quantised"):
        dequantize_directory(checkpoints / "dense", tmp_path / "out")
    with pytest.raises(CheckpointError, match="q_proj would stay as it is"):
        quantise(checkpoints / "dense", tmp_path / "out", ignore=["layers.1.self_attn.q_proj"])
    with pytest.raises(CheckpointError, match="no weight of .* would be quantised"):
        quantise(checkpoints / "dense", tmp_path / "out", ignore=["layers"])
    with pytest.raises(CheckpointError, match=r"model\.layers\.\d\.\S+: 256 columns are no multiple .* group size 96"):
        quantise(checkpoints / "dense", tmp_path / "out", PackedInt4(96))
    broken = write(tmp_path / "nan", {}, one={WEIGHT: torch.full((4, 4), float("nan"))})
    with pytest.raises(CheckpointError, match=f"{WEIGHT}: the weight holds inf or nan"):
        quantise(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_matrices_with_unknown_names_stay_and_are_listed(tmp_path):
    """Guessing could quantise a router; leaving it out of the list would make the engine expect FP8."""
    tensors = {WEIGHT: torch.randn(8, 8), "model.layers.0.mixer.novel.weight": torch.randn(8, 8)}
    source = write(tmp_path / "s", {}, one=tensors)
    rule = QuantizeRule(CheckpointDirectory(source), BlockFp8())
    assert rule.unknown == ["model.layers.0.mixer.novel"]
    listed = rule.config["quantization_config"]["modules_to_not_convert"]
    assert listed == ["lm_head", "model.layers.0.mixer.novel"]


def test_experts_in_one_tensor_become_single_ones(tmp_path):
    """Qwen3.5 stores [E, 2 * ffn, hidden] gate over up; quantised checkpoints hold each expert's matrices."""
    gate_up, down = torch.randn(3, 2 * 40, 24).bfloat16(), torch.randn(3, 24, 40).bfloat16()
    prefix = "model.language_model.layers.0.mlp.experts."
    tensors = {prefix + "gate_up_proj": gate_up, prefix + "down_proj": down}
    source = write(tmp_path / "s", {"model_type": "qwen3_5_moe"}, one=tensors)
    quantise(source, tmp_path / "out", TensorFp8())
    expected = {}
    for expert in range(3):
        matrices = {"gate_proj": gate_up[expert, :40], "up_proj": gate_up[expert, 40:], "down_proj": down[expert]}
        for leaf, matrix in matrices.items():
            parts = TensorFp8().quantize(matrix)
            expected |= {f"{prefix}{expert}.{leaf}.{part}": tensor for part, tensor in parts.items()}
    assert same_tensors(tensors_of(tmp_path / "out"), expected)
    other = write(tmp_path / "other", {"model_type": "gpt_oss"}, one=tensors)
    with pytest.raises(CheckpointError, match="model_type 'gpt_oss' in one tensor are not understood"):
        quantise(other, tmp_path / "out2")
