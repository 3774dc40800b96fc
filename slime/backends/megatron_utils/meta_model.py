"""The model of this rank without memory: on the meta device, with the shards its parameters have in a checkpoint."""

import contextlib
import copy
import io
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing
from megatron.training.argument_utils import core_transformer_config_from_args

from slime.backends.megatron_utils.arguments import megatron_only
from slime.backends.megatron_utils.model_provider import get_model_provider_func
from slime.backends.megatron_utils.update_weight.common import global_params
from slime.utils.misc import load_function
from slime.utils.model_facts import load_config
from slime.utils.safetensors_io import CheckpointDirectory

META = torch.device("meta")


@dataclass(frozen=True)
class Parameter:
    """One parameter (or router bias) of the model: its global name, the chunk that holds it, a meta tensor."""

    name: str
    model: torch.nn.Module
    tensor: torch.Tensor


@dataclass(frozen=True)
class Shard:
    """A part of a parameter as a checkpoint knows it: the view of the parameter that lies under a key."""

    parameter: Parameter
    key: str
    offsets: tuple[int, ...]
    stacked: int  # leading dimensions of the key that count layers or experts
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    whole: tuple[int, ...]  # shape of the key

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The same view of the parameter's values."""
        return values.as_strided(self.size, self.stride, self.start)


class MetaModel:
    """This rank's model chunks on the meta device. Megatron's groups must exist."""

    def __init__(self, args: Namespace):
        self.args = args
        self.chunks = _build(args)
        self._owners: dict[int, Parameter] = {}
        for chunk in self.chunks:
            for _, name, tensor in global_params(chunk):
                self._owners[tensor.untyped_storage()._cdata] = Parameter(name, unwrap_model(chunk), tensor)
        self._order = {owner.name: number for number, owner in enumerate(self._owners.values())}

    @property
    def parameters(self) -> list[Parameter]:
        """In the order of the model."""
        return list(self._owners.values())

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig."""
        return unwrap_model(self.chunks[0]).config

    def owner(self, tensor: torch.Tensor) -> Parameter:
        """The parameter of which `tensor`, part of the sharded state, is a view."""
        owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            raise ValueError(
                f"a tensor {tuple(tensor.shape)} of the model's checkpoint is a copy, not a view, of a parameter: "
                "this model cannot be converted as a stream"
            )
        return owner

    def position(self, tensor: torch.Tensor) -> int:
        """Of the tensor's owner in the order of the model."""
        return self._order[self.owner(tensor).name]

    def state(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The sharded state of the model with the arguments beside it, as Megatron saves it."""
        return checkpointing.generate_state_dict(
            megatron_only(self.args),
            unwrap_model(self.chunks),
            None,
            None,
            None,
            iteration=0,
            model_sd_kwargs={"metadata": dict(metadata)},
        )

    def shards(self, metadata: Mapping[str, Any]) -> dict[str, list[Shard]]:
        """Global parameter name -> where its parts lie in a checkpoint. Parts that lie there twice are listed once."""
        state = self.state(metadata)
        apply_factories(state)
        found: dict[str, dict[tuple, Shard]] = {parameter.name: {} for parameter in self.parameters}
        for value in nested_values(state):
            if isinstance(value, ShardedTensor):
                shard = self._shard(value)
                found[shard.parameter.name].setdefault((shard.size, shard.stride, shard.start), shard)
        return {name: list(shards.values()) for name, shards in found.items()}

    def _shard(self, value: ShardedTensor) -> Shard:
        data = value.data
        return Shard(
            parameter=self.owner(data),
            key=value.key,
            offsets=tuple(value.global_offset),
            stacked=value.prepend_axis_num,
            size=tuple(data.size()),
            stride=tuple(data.stride()),
            start=data.storage_offset(),
            whole=tuple(value.global_shape),
        )


def open_bridge(model: MetaModel, hf_directory: Path) -> Any:
    """The bridge between the model and a Hugging Face directory. ValueError for an unknown model_type."""
    get_bridge = load_function("slime_plugins.mbridge.get_bridge")  # bridges build on this package, so by name
    return get_bridge(load_config(hf_directory)[0], model.args.params_dtype, model.config)


def without_values(weights: Any) -> Any:
    """A copy of a bridge's weights whose tensors have shapes and dtypes only: reading costs nothing."""
    headers = copy.copy(weights)
    headers.directory = _Headers(weights.directory)
    return headers


class _Headers:
    """Stands in for a CheckpointDirectory: its tensors are on the meta device."""

    def __init__(self, directory: CheckpointDirectory):
        self._directory = directory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._directory, name)

    def __contains__(self, name: str) -> bool:
        return name in self._directory

    def read(self, name: str) -> torch.Tensor:
        """A meta tensor; the few numbers of a packed weight's shape are read."""
        if name.endswith(".weight_shape"):
            return self._directory.read(name)
        info = self._directory.info(name)
        return torch.empty(info.shape, dtype=info.dtype, device=META)


def _build(args: Namespace) -> list[torch.nn.Module]:
    config = core_transformer_config_from_args(args)
    config.init_model_with_meta_device = True  # the tied copies of the embedding are not synchronised then
    provider = get_model_provider_func(args, config)
    virtual = args.virtual_pipeline_model_parallel_size
    chunks = []
    with _on_meta():
        for stage in range(virtual) if virtual else (None,):
            place = {"ignore_virtual": False, "vp_stage": stage}
            first, last = mpu.is_pipeline_first_stage(**place), mpu.is_pipeline_last_stage(**place)
            chunk = provider(first, last, vp_stage=stage)
            chunks.append(Float16Module(config, chunk) if args.bf16 or args.fp16 else chunk)
    _keep_router_biases(chunks)
    return chunks


def _keep_router_biases(chunks: list[torch.nn.Module]) -> None:
    """Routers keep their bias in float32; the wrapper has cast it, which they undo when they are used."""
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Everything that is made goes to the meta device, also what Megatron puts on the current GPU."""
    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: META
    try:
        with META, contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.cuda.current_device = current_device
