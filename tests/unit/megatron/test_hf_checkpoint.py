"""Hugging Face directories: written by all pipeline stages, complete or not at all; read with loud errors."""

import json
import shutil

from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_megatron import Layout
from tests.helpers.tiny_models import make_tiny_model
from tests.unit.quantization.test_safetensors_io import largest_file


def _save(rank, world_size, path, output_dir, layout):
    from tests.helpers.tiny_megatron import load, start

    start(layout)
    from slime.backends.megatron_utils.hf_checkpoint import save_hf_checkpoint

    args, chunks = load(path, layout)
    for _ in range(2):  # the second replaces the first
        save_hf_checkpoint(args, chunks, output_dir, shard_bytes=60_000)
    with largest_file(50_000):
        full = _message(save_hf_checkpoint, args, chunks, output_dir)
    if rank == 0:
        shutil.rmtree(output_dir.with_name("7.partial"))
        (path / "config.json").rename(path / "hidden.json")
    return full, _message(save_hf_checkpoint, args, chunks, output_dir.with_name("refused"))


def _message(function, *args):
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def test_saved_directory_is_what_was_loaded(tmp_path):
    """Two stages: every tensor once, bit for bit, in shards with an index; nothing is left of a refused save, and a
    full disk costs nothing that was there."""
    from safetensors.torch import load_file

    path = make_tiny_model("qwen3_tied", tmp_path)
    (path / "tokenizer.json").write_text("{}")
    output_dir = tmp_path / "out" / "7"
    messages = run_ranks(_save, 2, path, output_dir, Layout(pp=2))
    assert all("cannot write" in full and ".safetensors: File too large" in full for full, _ in messages)
    assert all("config.json to save beside" in refused for _, refused in messages)
    assert [file.name for file in output_dir.parent.iterdir()] == ["7"]

    wanted = load_file(path / "model.safetensors")
    index = json.loads((output_dir / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(file.name for file in output_dir.glob("*.safetensors")) == files
    for file in files:
        for name, tensor in load_file(output_dir / file).items():
            assert tensor.equal(wanted[name]) and index["weight_map"][name] == file
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {f.name for f in output_dir.iterdir()}


def _load_wrong(rank, world_size, path):
    """What loading says when the checkpoint lacks a tensor, has another width, or is of an unknown family."""
    from safetensors.torch import load_file, save_file

    from tests.helpers.tiny_megatron import build, make_args, start

    layout = Layout()
    start(layout)
    from slime.backends.megatron_utils.hf_checkpoint import load_hf_weights

    args, chunks = make_args(path, layout), build(path, layout)
    weights = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    messages = []

    def attempt(changed_weights, changed_config):
        save_file(changed_weights, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | changed_config))
        try:
            load_hf_weights(args, chunks, path)
        except ValueError as error:
            messages.append(str(error))

    name = "model.layers.1.self_attn.o_proj.weight"
    attempt({key: tensor for key, tensor in weights.items() if key != name}, {})
    attempt(weights | {name: weights[name][:, :-1].contiguous()}, {})
    attempt(weights, {"model_type": "gpt_neox"})
    return messages


def test_loading_names_what_is_wrong(tmp_path):
    (messages,) = run_ranks(_load_wrong, 1, make_tiny_model("qwen3", tmp_path, num_hidden_layers=2))
    missing, shape, unknown = messages
    assert "has no tensor model.layers.1.self_attn.o_proj.weight" in missing
    assert "(48, 80)" in shape and "(48, 79)" in shape
    assert "no bridge for model_type 'gpt_neox' (known: deepseek_v3, " in unknown
