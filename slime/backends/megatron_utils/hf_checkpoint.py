"""Weights from and to Hugging Face directories: read into local model chunks, written atomically by all stages."""

import json
import logging
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.update_weight.buckets import Bucket
from slime.backends.megatron_utils.update_weight.common import agree, hf_buckets, is_weight_source
from slime.utils.misc import load_function
from slime.utils.model_facts import load_config
from slime.utils.safetensors_io import CheckpointDirectory, CheckpointError, TensorInfo, write_file

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 1024**3
INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")


def load_hf_weights(args: Namespace, model_chunks: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Fill the model chunks of this rank from a local Hugging Face directory. Every rank calls it.

    ValueError for a model_type without a bridge, a tensor that is missing, does not fit or has no place in the model.
    A main-parameter copy in an optimizer is not touched (reload_model_params does that).
    """
    get_bridge = load_function("slime_plugins.mbridge.get_bridge")  # bridges build on this package, so by name
    bridge = get_bridge(load_config(Path(path))[0], args.params_dtype, unwrap_model(model_chunks[0]).config)
    bridge.load_weights(list(model_chunks), str(path))


def save_hf_checkpoint(
    args: Namespace, model_chunks: Sequence[torch.nn.Module], output_dir: str | Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the model as a Hugging Face directory that appears at output_dir complete or not at all. Collective.

    One rank a pipeline stage writes its weights as safetensors of at most shard_bytes; rank 0 adds the index and the
    other files (config, tokenizer, generation config, code) of --hf-checkpoint. An existing output_dir is replaced.
    All ranks raise when one fails; output_dir is then as before.
    """
    output_dir = Path(output_dir)
    origin = Path(args.hf_checkpoint)
    partial = output_dir.with_name(output_dir.name + ".partial")
    agree(_prepare, origin, output_dir, partial)
    written: dict[str, tuple[dict[str, int], int]] = {}
    agree(_write_shards, args, model_chunks, partial, shard_bytes, written)
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, written)
    agree(_publish, origin, output_dir, partial, everywhere)


def _prepare(origin: Path, output_dir: Path, partial: Path) -> None:
    if not (origin / "config.json").is_file():
        raise ValueError(
            f"--hf-checkpoint {origin} must be a local directory with a config.json to save beside weights"
        )
    if output_dir.resolve() == origin.resolve():
        raise ValueError(f"the output directory {output_dir} is --hf-checkpoint itself; choose another one")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def _write_shards(
    args: Namespace, model_chunks: Sequence[torch.nn.Module], partial: Path, shard_bytes: int, written: dict
) -> None:
    """Fill `written`: file name -> ({tensor name: bytes}, pipeline stage), in order."""
    if not is_weight_source(with_peers=True):
        return
    stage = mpu.get_pipeline_model_parallel_rank()
    for number, bucket in enumerate(hf_buckets(args, model_chunks, shard_bytes)):
        if not is_weight_source():
            continue
        file = f"stage-{stage:05d}-{number:05d}.safetensors"
        _write_file(partial / file, bucket)
        written[file] = ({name: tensor.nbytes for name, tensor in bucket}, stage)


def _write_file(path: Path, bucket: Bucket) -> None:
    write_file(path, {name: TensorInfo.of(tensor) for name, tensor in bucket}, bucket)


def _publish(origin: Path, output_dir: Path, partial: Path, everywhere: Sequence[dict]) -> None:
    if dist.get_rank() != 0:
        return
    shards = sorted((file, tensors) for written in everywhere for file, (tensors, _) in written.items())
    weight_map: dict[str, str] = {}
    for number, (file, tensors) in enumerate(shards, start=1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (partial / file).rename(partial / final)
        twice = weight_map.keys() & tensors.keys()
        if twice:
            raise ValueError(f"tensor {min(twice)} would be written twice, by two pipeline stages")
        weight_map.update(dict.fromkeys(tensors, final))
    if not weight_map:
        raise ValueError(f"no weights were written for {output_dir}")
    total = sum(size for _, tensors in shards for size in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _copy_other_files(origin, partial)
    _warn_of_missing(origin, weight_map)
    replaced = output_dir.with_name(output_dir.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output_dir.exists():
        output_dir.rename(replaced)
    partial.rename(output_dir)
    shutil.rmtree(replaced, ignore_errors=True)


def _copy_other_files(origin: Path, target: Path) -> None:
    """Everything at the top of the origin but weights and their indices."""
    for file in origin.iterdir():
        is_weight = file.suffix in _WEIGHT_SUFFIXES and not file.name.startswith("tokenizer")
        if file.is_file() and not is_weight and not file.name.endswith(".index.json"):
            shutil.copy(file, target / file.name)


def _warn_of_missing(origin: Path, weight_map: dict[str, str]) -> None:
    if not any(origin.glob("*.safetensors")):
        return
    try:
        missing = sorted(CheckpointDirectory(origin).weight_map.keys() - weight_map.keys())
    except CheckpointError as error:
        logger.warning("whether all tensors of %s were saved cannot be told: %s", origin, error)
        return
    if missing:
        logger.warning(
            "%d tensors of %s are not part of the trained model and were not saved, e.g. %s",
            len(missing),
            origin,
            missing[0],
        )
