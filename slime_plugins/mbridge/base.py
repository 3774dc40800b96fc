"""What mbridge 0.15.1 lacks for megatron-core 0.19 and transformers 5, mended once for all families.

The mends become unnecessary when mbridge supports both; each says what it is for.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from mbridge.core import LLMBridge
from mbridge.core.util import unwrap_model
from safetensors import safe_open
from transformers import PretrainedConfig

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class BaseBridge(LLMBridge):
    """Mixin before an mbridge bridge class: reads a checkpoint into Megatron model chunks, loudly."""

    def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16, **kwargs: Any):
        # mbridge edits this class attribute for tied embeddings; an untied model of the family would inherit that.
        self._DIRECT_MAPPING = dict(type(self)._DIRECT_MAPPING)
        super().__init__(_with_plain_fields(hf_config), dtype=dtype, **kwargs)

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        # Fused kernels that only exist for GPUs; the bridge's config describes names and shapes, nothing runs with it.
        plain = {"persist_layer_norm": False, "masked_softmax_fusion": False, "gradient_accumulation_fusion": False}
        return super()._build_base_config(text_config_key, **(plain | kwargs))

    def _adjust_mapping_for_shared_weights(self) -> None:
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = self._DIRECT_MAPPING["embedding.word_embeddings.weight"]

    @torch.no_grad()
    def load_weights(
        self, models: Sequence[torch.nn.Module], weights_path: str, memory_efficient: bool = True
    ) -> None:
        """Fill every parameter (and router expert bias) of the model chunks from the safetensors of a directory.

        Each rank reads what it needs, one parameter at a time; there is no communication. Vocabulary rows beyond the
        checkpoint's are zeros. A value head (one output row) keeps its values. KeyError for a tensor that the
        checkpoint lacks, ValueError for a shape that does not fit.
        """
        with Checkpoint(weights_path) as checkpoint:
            for model in models:
                targets = _targets(unwrap_model(model))
                global_names = self._weight_name_mapping_mcore_local_to_global(model)
                for name, target in targets.items():
                    self._load_one(checkpoint, name, global_names[name], target)

    def _load_one(self, checkpoint: "Checkpoint", name: str, global_name: str, target: torch.Tensor) -> None:
        hf_names = self._weight_name_mapping_mcore_to_hf(global_name)
        if global_name == "output_layer.weight" and target.size(0) == 1:
            return
        full = self._weight_to_mcore_format(name, [checkpoint.read(hf_name) for hf_name in hf_names])
        experts = ".mlp.experts.linear_fc" in name
        size, rank = (self.mpu.etp_size, self.mpu.etp_rank) if experts else (self.mpu.tp_size, self.mpu.tp_rank)
        if name in VOCABULARY:
            full = _pad_rows(full, target.size(0) * size)
        shard = self._weight_split_across_tp(name, full, target, size)[rank]
        if shard.shape != target.shape:
            raise ValueError(
                f"{global_name} has shape {tuple(target.shape)} on this rank, but {', '.join(hf_names)} of "
                f"{checkpoint.path} give {tuple(shard.shape)}: the model arguments do not describe this checkpoint"
            )
        target.copy_(shard)


class Checkpoint:
    """The safetensors files of a directory, read tensor by tensor. Use as a context manager."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.files = self._find()
        self._open_files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, on the CPU, in the dtype of the file. KeyError when it is not there."""
        if name not in self.files:
            raise KeyError(f"{self.path} has no tensor {name} (it has {len(self.files)})")
        tensor = self._open(self.files[name]).get_tensor(name)
        if tensor.element_size() == 1:
            raise ValueError(
                f"{name} of {self.path} is quantised ({tensor.dtype}); convert the checkpoint to bfloat16 first"
            )
        return tensor

    def _open(self, file: str) -> Any:
        if file not in self._open_files:
            opened = safe_open(self.path / file, framework="pt", device="cpu")
            self._open_files[file] = self._stack.enter_context(opened)
        return self._open_files[file]

    def _find(self) -> dict[str, str]:
        """Tensor name -> file name, from the index or by looking into every safetensors file."""
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            return json.loads(index.read_text())["weight_map"]
        names = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, framework="pt", device="cpu") as opened:
                names.update(dict.fromkeys(opened.keys(), file.name))
        if not names:
            raise FileNotFoundError(f"{self.path} holds no *.safetensors file to load weights from")
        return names


def _targets(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint must fill: all parameters, and the routers' expert biases, which are buffers."""

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.named_parameters()
        yield from ((name, buffer) for name, buffer in model.named_buffers() if "expert_bias" in name)

    return dict(named())


def _pad_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """weight: [vocabulary, hidden] -> [rows, hidden], zeros below."""
    if weight.size(0) >= rows:
        return weight
    return torch.cat((weight, weight.new_zeros(rows - weight.size(0), weight.size(1))))


def _with_plain_fields(hf_config: PretrainedConfig) -> PretrainedConfig:
    """A copy with the attributes mbridge reads: transformers 5 keeps the rotary ones in rope_parameters."""
    config = copy.copy(hf_config)
    rope = config.rope_parameters or {}
    for field in ("rope_theta", "partial_rotary_factor"):
        if field in rope:
            setattr(config, field, rope[field])
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config
