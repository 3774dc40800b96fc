"""Conversions in the processes of tests: both tools as functions, and checks that share a process with others."""

import argparse
import ctypes
import json
import shutil
from pathlib import Path

from slime.backends.megatron_utils.convert_process import Place
from tools import convert_hf_to_torch_dist, convert_torch_dist_to_hf


def weights_of(directory):
    from safetensors.torch import load_file

    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def differences(first, second):
    """Names, dtypes and bits."""
    import torch

    names = first.keys() ^ second.keys()
    return sorted(names) + [
        name
        for name in first.keys() & second.keys()
        if first[name].dtype != second[name].dtype
        or not torch.equal(first[name].contiguous().view(torch.uint8), second[name].contiguous().view(torch.uint8))
    ]


def prepare():
    import logging
    import warnings

    from slime.utils.accelerator import get_accelerator

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    get_accelerator("cpu").prepare_trainer()
    from slime.backends.megatron_utils import torch_te

    torch_te.install()


def forth(hf, save, *argv, rank=0, world_size=1, force=False):
    options = argparse.Namespace(hf_checkpoint=hf, save=save, force=force)
    try:
        convert_hf_to_torch_dist.convert(options, list(argv), Place(rank, world_size, "", 0))
    except Exception:
        close()
        raise


def back(source, origin, target, *argv):
    paths = ["--input-dir", str(source), "--origin-hf-dir", str(origin), "--output-dir", str(target)]
    try:
        return convert_torch_dist_to_hf.convert(convert_torch_dist_to_hf.parse_args([*paths, *argv]))
    except Exception:
        close()
        raise


def close():
    """Megatron's groups of a conversion that failed."""
    from megatron.core import mpu

    from slime.backends.megatron_utils.initialize import shutdown_megatron

    if mpu.model_parallel_is_initialized():
        shutdown_megatron()


def quantised_input(root):
    """FP8 in blocks, experts in INT4 as Kimi-K2-Thinking has them: against the directory cast to bfloat16 first."""
    from safetensors.torch import save_file

    from slime.backends.megatron_utils.megatron_to_hf.processors.directories import (
        dequantize_directory,
        quantize_directory,
    )
    from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8
    from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4

    found = {}
    plain = root / "kimi"
    shutil.copytree(root / "hf" / "deepseek_v3", plain)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2", "dtype": "bfloat16"}))
    weights = {key: t if key.endswith("bias") else t.bfloat16() for key, t in weights_of(plain).items()}
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    for name, format in (("fp8 blocks", BlockFp8((32, 16))), ("int4 experts", PackedInt4(8))):
        quantised, cast = root / f"quantised {name}", root / f"cast {name}"
        quantize_directory(plain, quantised, format)
        dequantize_directory(quantised, cast)
        forth(quantised, root / f"megatron {name}")
        forth(cast, root / f"cast megatron {name}")
        back(root / f"megatron {name}", quantised, root / f"back {name}")
        back(root / f"cast megatron {name}", cast, root / f"cast back {name}")
        found[name] = (
            differences(weights_of(cast), weights_of(root / f"back {name}")),
            differences(weights_of(cast), weights_of(root / f"cast back {name}")),
            json.loads((root / f"back {name}" / "config.json").read_text()).get("quantization_config"),
            len(weights_of(quantised)) - len(weights_of(cast)),
        )
    return found | {"beside vision": _beside_vision(plain, root)}


def _beside_vision(plain, root):
    """Differences of Kimi-K2.5, whose language model has a prefix and a config of its own; vision is left out."""
    from safetensors.torch import save_file

    hf = root / "kimi_k25"
    shutil.copytree(plain, hf)
    text = json.loads((plain / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    weights = weights_of(plain)
    language = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    vision = {"vision_tower.patch_embed.proj.weight", "mm_projector.linear_1.weight"}
    others = {name: weights["model.norm.weight"].clone() for name in vision}
    save_file(language | others, hf / "model.safetensors", metadata={"format": "pt"})
    forth(hf, root / "megatron kimi_k25")
    back(root / "megatron kimi_k25", hf, root / "back kimi_k25")
    return differences(language, weights_of(root / "back kimi_k25"))


def transformer_engine_keys(root):
    """A checkpoint as a run with Transformer Engine writes it: bytes as `_extra_state` of every module, also of
    attention, which has none otherwise. And what Megatron says when such a model loads a checkpoint of ours.
    """
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from torch.distributed.checkpoint.api import CheckpointException

    from slime.backends.megatron_utils.torch_dist_stream import TorchDistReader
    from tests.helpers.trainer import trainer_args
    from tests.helpers.trainer_runs import hf_weights, open_trainer

    hf, source, target = root / "hf" / "qwen3", root / "one_qwen3" / "release", root / "engine" / "release"
    reader = TorchDistReader(source)
    target.mkdir(parents=True)
    weights = {}
    for key in reader.keys:
        whole = reader.shape(key)
        if not key.startswith("decoder.layers."):
            weights[key] = ShardedTensor.from_rank_offsets(key, reader.read(key, [0] * len(whole), 0, whole))
            continue
        for layer in range(whole[0]):  # stacked, as Megatron has them
            values = reader.read(key, [layer] + [0] * len(whole[1:]), 1, whole[1:])
            place = (0, layer, whole[0])
            weights[f"{key}{layer}"] = ShardedTensor.from_rank_offsets(key, values, place, prepend_axis_num=1)
    states = {}
    own = {name.partition("/")[0] for name in reader.metadata.state_dict_metadata if "_extra_state" in name}
    for key in own | {"decoder.layers.self_attention.core_attention._extra_state"}:
        count = 4 if key.startswith("decoder.layers.") else 1
        for layer in range(count):
            values = torch.zeros(3, dtype=torch.uint8)
            states[f"{key}{layer}"] = ShardedObject(key, values, (count,), (layer,))
    dist_checkpointing.save(weights | states | reader.common(), str(target))
    (root / "engine" / "latest_checkpointed_iteration.txt").write_text("release")
    back(root / "engine", hf, root / "back_engine")
    wanted = weights_of(hf)
    with open_trainer(trainer_args("qwen3", hf, load=str(root / "engine")), 0, 1) as trainer:
        held = hf_weights(trainer)
    try:
        dist_checkpointing.load(dict(states), str(source))
        refused = "no error"
    except CheckpointException as error:
        refused = str(error)
    loaded = dist_checkpointing.load(weights | states, str(source), strict="log_unexpected")
    return {
        "extra state": {
            "keys": sum("_extra_state" in key for key in TorchDistReader(target).metadata.state_dict_metadata),
            "exported": differences(wanted, weights_of(root / "back_engine")),
            "trained": sorted(key for key in wanted if not (held[key] == wanted[key].numpy()).all()),
            "refused": refused,
            "taken": [len(weights.keys() - loaded.keys())],
        }
    }


def memory(root):
    """What both directions add to this process's memory, as a share of the one file of a model of 80 MB."""
    import torch
    from safetensors.torch import save_file

    hf = root / "large"
    shutil.copytree(root / "hf" / "qwen3", hf)
    sides = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "head_dim": 128,
        "layer_types": None,
    }
    config = json.loads((hf / "config.json").read_text()) | sides
    (hf / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    small = weights_of(root / "hf" / "qwen3")
    resized = {48: 512, 112: 2048, 80: 512, 40: 256, 20: 128}
    weights = {
        name.replace("layers.0.", f"layers.{layer}."): torch.randn([resized.get(side, side) for side in tensor.shape])
        for layer in range(8)
        for name, tensor in small.items()
        if not any(f"layers.{other}." in name for other in (1, 2, 3))
    }
    save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    del weights
    whole = (hf / "model.safetensors").stat().st_size
    there = _peak_of(forth, hf, root / "one_large")
    again = _peak_of(back, root / "one_large", hf, root / "back_large")
    same = differences(weights_of(hf), weights_of(root / "back_large"))
    return {"memory": (whole, there / whole, again / whole, same)}


def _peak_of(function, *args):
    """Bytes by which the process grew while it ran."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free and kept would be used again, unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    function(*args)
    return _status("VmHWM") - before


def _status(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))
