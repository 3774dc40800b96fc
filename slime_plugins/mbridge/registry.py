"""One registry: the model_type of a config.json -> its bridge class, which names the family's table and layer spec."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from mbridge.core import register_model
from megatron.core.transformer import TransformerConfig
from transformers import PretrainedConfig

from slime.backends.megatron_utils.megatron_to_hf import register_family
from slime_plugins.mbridge.base import BaseBridge

_BRIDGES: dict[str, type[BaseBridge]] = {}


def register_bridge(*model_types: str) -> Callable[[type[BaseBridge]], type[BaseBridge]]:
    """Class decorator: load these `model_type`s of config.json with the bridge, and export them by its table.

    mbridge's own registry learns of it too. The last registration wins.
    """

    def register(bridge: type[BaseBridge]) -> type[BaseBridge]:
        register_model(list(model_types))(bridge)
        for model_type in model_types:
            _BRIDGES[model_type] = bridge
            register_family(model_type, bridge.family)
        return bridge

    return register


def supported_model_types() -> list[str]:
    """The registered model types, sorted."""
    return sorted(_BRIDGES)


def bridge_class(model_type: str) -> type[BaseBridge]:
    """ValueError for an unknown model_type, with the nearest and all known ones."""
    if model_type not in _BRIDGES:
        near = difflib.get_close_matches(model_type, _BRIDGES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"no bridge for model_type {model_type!r} (known: {', '.join(supported_model_types())}){hint} "
            "Register one with slime_plugins.mbridge.register_bridge"
        )
    return _BRIDGES[model_type]


def get_bridge(
    hf_config: PretrainedConfig | Mapping[str, Any], dtype: torch.dtype, config: TransformerConfig | None = None
) -> BaseBridge:
    """The bridge of a checkpoint, for the model-parallel grid of this process.

    hf_config: transformers' object or the content of config.json. dtype: of the Megatron parameters. config: of the
    models that will be filled, when they exist. ValueError for an unknown model_type.
    """
    is_object = isinstance(hf_config, PretrainedConfig)
    model_type = hf_config.model_type if is_object else hf_config.get("model_type", "")
    return bridge_class(model_type)(hf_config, dtype, config=config)
