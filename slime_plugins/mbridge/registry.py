"""Which bridge class serves which model_type of a Hugging Face config."""

import difflib
from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from slime_plugins.mbridge.base import BaseBridge

_BRIDGES: dict[str, type[BaseBridge]] = {}


def register_bridge(*model_types: str) -> Callable[[type[BaseBridge]], type[BaseBridge]]:
    """Class decorator: use this bridge for these `model_type`s of config.json; the last registration wins."""

    def register(bridge: type[BaseBridge]) -> type[BaseBridge]:
        for model_type in model_types:
            _BRIDGES[model_type] = bridge
        return bridge

    return register


def supported_model_types() -> list[str]:
    """The registered model types, sorted."""
    return sorted(_BRIDGES)


def get_bridge(hf_config: PretrainedConfig, dtype: torch.dtype) -> BaseBridge:
    """The bridge of a checkpoint, for the model-parallel grid of this process. dtype: of the Megatron parameters.

    ValueError for an unknown model_type, with the known ones.
    """
    model_type = hf_config.model_type
    if model_type not in _BRIDGES:
        near = difflib.get_close_matches(model_type, _BRIDGES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"no bridge for model_type {model_type!r} (known: {', '.join(supported_model_types())}){hint} "
            "Register one with slime_plugins.mbridge.register_bridge"
        )
    return _BRIDGES[model_type](hf_config, dtype=dtype)
