"""A Megatron checkpoint as a Hugging Face directory, parameter by parameter: no model is ever in memory. One process.

What tools/convert_torch_dist_to_hf.py does once it knows what is meant.
"""

import copy
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import mpu

from slime.backends.megatron_utils.megatron_to_hf import family_of
from slime.backends.megatron_utils.megatron_to_hf.processors.padding import remove_padding
from slime.backends.megatron_utils.meta_model import META, MetaModel, Parameter, Shard, open_bridge, without_values
from slime.backends.megatron_utils.torch_dist_stream import TorchDistReader
from slime.utils import safetensors_io
from slime.utils.convert_checkpoint import Summary, convert_checkpoint
from slime.utils.model_facts import load_config
from slime.utils.safetensors_io import CheckpointError, TensorInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HfOptions:
    """How a Megatron checkpoint becomes a Hugging Face directory.

    model_name: of the conversion table, else config.json's model_type. vocab_size: rows of the two vocabulary
    matrices, else config.json's. add_missing: tensors that the checkpoint lacks are copied from the origin.
    shard_bytes: of a file, at most, unless one tensor is larger.
    """

    model_name: str | None = None
    vocab_size: int | None = None
    add_missing: bool = False
    shard_bytes: int = 5 * 1024**3
    max_workers: int = 1
    force: bool = False


def write_hf(args: Namespace, reader: TorchDistReader, origin: Path, target: Path, options: HfOptions) -> Summary:
    """The weights of a Megatron checkpoint as a Hugging Face directory. One process, with Megatron's groups of one.

    args: `stored_model_args`. origin: the model's Hugging Face directory, whose config, tokenizer and other files are
    copied, and whose tensor names and shapes the result must have. See convert_checkpoint for how the output appears
    and for resuming. CheckpointError for what users can mend.
    """
    safetensors_io.check_target(reader.path, target, options.force)
    rule = _ToHf(args, reader, origin, options)
    for line in rule.notes:
        logger.info("%s", line)
    source = _Planned(origin, rule, reader, options.shard_bytes)
    settings = {"from": "torch_dist", **{key: str(value) for key, value in vars(options).items() if key != "force"}}
    return convert_checkpoint(
        source, target, rule, rule.config, settings=settings, max_workers=options.max_workers, force=options.force
    )


class _ToHf:
    """The rule of convert_checkpoint. An item is a parameter of the model, a tensor of the origin that holds several
    of them, or one that is copied.
    """

    def __init__(self, args: Namespace, reader: TorchDistReader, origin: Path, options: HfOptions):
        self._reader = reader
        self._model = MetaModel(args)
        self._bridge = open_bridge(self._model, origin)
        self._family = family_of(options.model_name) if options.model_name else self._bridge.family
        self._vocab_size = options.vocab_size or args.vocab_size
        metadata = reader.common().get("content_metadata") or {}
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        self._shards = self._model.shards({**metadata, "dp_cp_group": group})
        self._parameters = {parameter.name: parameter for parameter in self._model.parameters}
        _check_keys(reader, self._shards, self._parameters)
        self.notes: list[str] = []
        self._packed: dict[str, list[str]] = {}  # tensor of the origin -> the parameters it holds
        self._copied: dict[str, TensorInfo] = {}
        self._origin: Any = None
        if any(origin.glob("*.safetensors")):
            self._origin = self._bridge.weights_class(origin)
            self._compare(options.add_missing)
        self.config = _config_of(load_config(origin)[0], self._dtype(next(iter(self._parameters))))

    @property
    def items(self) -> dict[str, TensorInfo]:
        """Every item with the bytes it takes, in the order of the model."""
        first_of = {names[0]: packed for packed, names in self._packed.items()}
        others = {name for names in self._packed.values() for name in names[1:]}
        found = {}
        for name, parameter in self._parameters.items():
            if name in first_of:
                found[first_of[name]] = self._packed_info(first_of[name])
            elif name not in others:
                found[name] = TensorInfo(self._dtype(name), tuple(parameter.tensor.shape))
        return found | self._copied

    def outputs(self, name: str) -> dict[str, TensorInfo]:
        """See Rule."""
        if name in self._copied:
            return {name: self._copied[name]}
        if name in self._packed:
            return {name: self._packed_info(name)}
        meta = torch.empty(self._parameters[name].tensor.shape, dtype=self._dtype(name), device=META)
        return {hf_name: TensorInfo.of(tensor) for hf_name, tensor in self._converted(name, meta)}

    def convert(self, name: str) -> Iterable[tuple[str, torch.Tensor]]:
        """See Rule."""
        if name in self._copied:
            return [(name, copy.copy(self._origin).read(name))]
        if name in self._packed:
            return [(name, self._pack(name))]
        return self._converted(name, self._read(name))

    def _read(self, name: str) -> torch.Tensor:
        shape = tuple(self._parameters[name].tensor.shape)
        if [shard.size for shard in self._shards[name]] == [shape]:
            (shard,) = self._shards[name]
            return self._reader.read(shard.key, shard.offsets, shard.stacked, shape)
        values = torch.empty(shape, dtype=self._dtype(name))
        for shard in self._shards[name]:
            self._reader.read_into(shard.of(values), shard.key, shard.offsets, shard.stacked)
        return values

    def _pack(self, packed: str) -> torch.Tensor:
        """The tensor of the origin's layout that holds several parameters: where it is read from is written to."""
        whole = torch.empty(self._packed_info(packed).shape, dtype=self._packed_info(packed).dtype)
        places = copy.copy(self._origin)
        places.directory = _Holding(self._origin.directory, packed, whole)
        filled = 0
        for name in self._packed[packed]:
            for hf_name, tensor in self._converted(name, self._read(name)):
                places.read(hf_name).copy_(tensor)
                filled += tensor.numel()
        if filled != whole.numel():
            raise CheckpointError(f"{packed} of {self._origin.path} holds {whole.numel()} numbers, not {filled}")
        return whole

    def _packed_info(self, packed: str) -> TensorInfo:
        return TensorInfo(self._dtype(self._packed[packed][0]), self._origin.directory.info(packed).shape)

    def _converted(self, name: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return self._family.convert(self._model.config, name, remove_padding(name, values, self._vocab_size))

    def _dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(self._shards[name][0].key)

    def _compare(self, add_missing: bool) -> None:
        """Names and shapes against the origin's; what only the origin has is copied, counted, or refused."""
        headers, path = without_values(self._origin), self._origin.path
        used: set[str] = set()
        packed: dict[str, list[str]] = {}
        for name in self._parameters:
            for hf_name, info in self.outputs(name).items():
                if hf_name not in headers:
                    raise CheckpointError(f"{path} has no {hf_name}, which {name} becomes")
                shape = tuple(headers.read(hf_name).shape)
                if shape != info.shape:
                    raise CheckpointError(
                        f"{hf_name} is {list(info.shape)} in {self._reader.path}, and {list(shape)} in {path}: "
                        "is this the directory that the model came from?"
                    )
                parts = headers.parts(hf_name)
                used.update(parts)
                if len(parts) == 1 and parts[0] != hf_name and name not in packed.setdefault(parts[0], []):
                    packed[parts[0]].append(name)
        self._packed = packed
        left = sorted(self._origin.names - used - self._tied_copies())
        unknown = [name for name in left if not self._bridge.may_be_left(name, self._model.config)]
        if add_missing:
            self._copied = dict(_plain_infos(headers, left))
            self.notes.append(f"{len(self._copied)} tensors are copied from {path}")
        elif unknown:
            raise CheckpointError(
                f"{len(unknown)} tensors of {path} are not in {self._reader.path}, e.g. {unknown[0]}; "
                "--add-missing-from-origin-hf copies them"
            )
        elif left:
            self.notes.append(
                f"{len(left)} tensors of {path} are no part of the trained model and are left out, e.g. {left[0]}; "
                "--add-missing-from-origin-hf copies them"
            )

    def _tied_copies(self) -> set[str]:
        """The origin's copy of a tied embedding, which training has made stale; readers tie it themselves."""
        tied = self._bridge.hf_fields.get("tie_word_embeddings") and "output_layer.weight" not in self._parameters
        return set(self._family.hf_names(self._model.config, "output_layer.weight")) if tied else set()


class _Holding:
    """Stands in for a CheckpointDirectory in which the tensor `name` is `tensor`."""

    def __init__(self, directory: safetensors_io.CheckpointDirectory, name: str, tensor: torch.Tensor):
        self._directory = directory
        self._held = {name: tensor}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._directory, name)

    def __contains__(self, name: str) -> bool:
        return name in self._directory

    def read(self, name: str) -> torch.Tensor:
        """The tensor itself: its views can be written to."""
        return self._held[name]


def _plain_infos(headers: Any, names: Iterable[str]) -> Iterator[tuple[str, TensorInfo]]:
    """The unquantised tensors that the files' tensors `names` make up."""
    for name in names:
        weight = name.rpartition(".")[0] + ".weight"
        plain = weight if name in headers.parts(weight) else name
        yield plain, TensorInfo.of(headers.read(plain))


def _check_keys(
    reader: TorchDistReader, shards: Mapping[str, list[Shard]], parameters: Mapping[str, Parameter]
) -> None:
    """Every parameter lies in the checkpoint whole, and nothing else does."""
    keys, used = reader.keys, set()
    for name, parts in shards.items():
        if sum(prod(part.size) for part in parts) != parameters[name].tensor.numel():
            raise CheckpointError(f"{name} is not part of what Megatron saves of this model")
        for part in parts:
            if part.key not in keys:
                raise CheckpointError(f"{reader.path} has no {part.key}, which the model of config.json needs")
            if reader.shape(part.key) != part.whole:
                raise CheckpointError(
                    f"{reader.path}: {part.key} is {list(reader.shape(part.key))}, the model of config.json needs "
                    f"{list(part.whole)}"
                )
            used.add(part.key)
    left = sorted(keys - used)
    if left:
        raise CheckpointError(
            f"{len(left)} tensors of {reader.path} have no place in the model of config.json: {', '.join(left[:5])}"
        )


def _config_of(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the result: unquantised, in the dtype of the weights."""

    def plain(part: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in part.items() if key != "quantization_config"}
        for key in ("dtype", "torch_dtype"):
            if key in kept:
                kept[key] = str(dtype).removeprefix("torch.")
        return kept

    result = plain(config)
    if isinstance(result.get("text_config"), Mapping):
        result["text_config"] = plain(result["text_config"])
    return result


class _Planned:
    """What convert_checkpoint reads: the checkpoint's parameters, dealt to the files that will hold them."""

    def __init__(self, origin: Path, rule: _ToHf, reader: TorchDistReader, shard_bytes: int):
        self.path = origin
        self._reader = reader
        groups: list[dict[str, TensorInfo]] = [{}]
        size = 0
        for name, info in rule.items.items():
            if groups[-1] and size + info.nbytes > shard_bytes:
                groups.append({})
                size = 0
            groups[-1][name] = info
            size += info.nbytes
        self.files = {
            f"model-{number:05d}-of-{len(groups):05d}.safetensors": SimpleNamespace(infos=infos)
            for number, infos in enumerate(groups, start=1)
        }

    def identity(self) -> list[tuple[str, int, int]]:
        """Name, size and modification time of what the result is made of."""
        files = [*self._reader.files(), *sorted(self.path.glob("*.json"))]
        return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
