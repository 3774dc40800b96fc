"""Megatron parameters as Hugging Face tensors: picks the family of a model, converts one full parameter at a time."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.megatron_to_hf.deepseekv3 import DEEPSEEKV3, KIMI_K25
from slime.backends.megatron_utils.megatron_to_hf.family import Family, strip_module_prefix
from slime.backends.megatron_utils.megatron_to_hf.glm4 import GLM4
from slime.backends.megatron_utils.megatron_to_hf.glm4moe import GLM4MOE
from slime.backends.megatron_utils.megatron_to_hf.llama import LLAMA
from slime.backends.megatron_utils.megatron_to_hf.mimo import MIMO
from slime.backends.megatron_utils.megatron_to_hf.minimax_m2 import MINIMAX_M2
from slime.backends.megatron_utils.megatron_to_hf.processors import quantize
from slime.backends.megatron_utils.megatron_to_hf.processors.padding import remove_padding
from slime.backends.megatron_utils.megatron_to_hf.qwen2 import QWEN2
from slime.backends.megatron_utils.megatron_to_hf.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from slime.backends.megatron_utils.megatron_to_hf.qwen3_next import QWEN3_NEXT
from slime.backends.megatron_utils.megatron_to_hf.qwen3moe import QWEN3MOE

# The longest key contained in the normalised model name decides: "qwen3moe" before "qwen3".
_FAMILIES: dict[str, Family] = {
    "minimaxm2": MINIMAX_M2,
    "glm4moelite": DEEPSEEKV3,
    "deepseekv3": DEEPSEEKV3,
    "glmmoedsa": DEEPSEEKV3,
    "kimi": DEEPSEEKV3,
    "kimik25": KIMI_K25,
    "glm4moe": GLM4MOE,
    "glm4": GLM4,
    "qwen2moe": QWEN3MOE,
    "qwen3moe": QWEN3MOE,
    "qwen3next": QWEN3_NEXT,
    "qwen35": QWEN3_5,
    "qwen35text": QWEN3_5_TEXT,
    "qwen35moetext": QWEN3_5_TEXT,
    "qwen2": QWEN2,
    "qwen3": QWEN2,
    "llama": LLAMA,
    "mimo": MIMO,
}
# Names that contain a key above and are another architecture.
_NOT_YET = ("qwen3vl",)


def convert_to_hf(
    args: Namespace,
    model_name: str,
    name: str,
    param: torch.Tensor,
    quantization_config: dict[str, Any] | None = None,
) -> list[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors of one Megatron parameter, as (name, tensor); views of `param` where possible.

    name: global Megatron name, leading "module." allowed. param: the whole (TP-gathered) tensor, vocabulary padding
    included. quantization_config: of the checkpoint that the tensors must look like: weights come with their scales.
    ValueError for an unknown model or parameter, or a quantisation that is not understood.
    """
    name = strip_module_prefix(name)
    pairs = _convert_to_hf_core(args, model_name, name, remove_padding(name, param, args.vocab_size))
    return pairs if quantization_config is None else list(quantize(pairs, quantization_config))


def conversion_name(args: Namespace) -> str:
    """--model-name, or the model_type in the config.json of --hf-checkpoint."""
    if args.model_name is not None:
        return args.model_name
    return json.loads((Path(args.hf_checkpoint) / "config.json").read_text())["model_type"]


def register_family(model_name: str, family: Family) -> None:
    """Export models whose name contains `model_name` with this table; the last registration wins."""
    _FAMILIES[_normalised(model_name)] = family


def quantization_of(args: Namespace) -> dict[str, Any] | None:
    """The quantization_config of --hf-checkpoint, in whose format engines expect weights; None for plain weights."""
    if args.hf_checkpoint is None:
        return None
    config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    return config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")


def family_of(model_name: str) -> Family:
    """The family of e.g. "qwen3", "Qwen3Config" or "qwen2_5"; ValueError lists the known ones."""
    normalised = _normalised(model_name)
    contained = [key for key in (*_FAMILIES, *_NOT_YET) if key in normalised]
    found = max(contained, key=len, default=None)
    if found in _FAMILIES:
        return _FAMILIES[found]
    raise ValueError(f"no weight conversion for model {model_name!r}: known are {', '.join(_FAMILIES)} (--model-name)")


def _normalised(model_name: str) -> str:
    return model_name.lower().replace("_", "").replace("-", "")


def _convert_to_hf_core(
    args: Namespace, model_name: str, name: str, param: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    return family_of(model_name).convert(args, name, param)
