"""Bridges from Hugging Face checkpoints to Megatron models: one registry `model_type -> bridge class`.

A bridge knows the names and the layout of one model family; add one with `register_bridge`.
"""

from slime_plugins.mbridge import (  # registers the bridges that come with slime
    deepseek_v3,
    deepseek_v32,
    dense,
    glm4,
    glm4moe,
    mimo,
    minimax_m2,
    qwen3_5,
    qwen3_next,
    qwen_moe,
)
from slime_plugins.mbridge.base import BaseBridge
from slime_plugins.mbridge.registry import bridge_class, get_bridge, register_bridge, supported_model_types
from slime_plugins.mbridge.weights import Weights

__all__ = [
    "BaseBridge",
    "Weights",
    "bridge_class",
    "deepseek_v3",
    "deepseek_v32",
    "dense",
    "get_bridge",
    "glm4",
    "glm4moe",
    "mimo",
    "minimax_m2",
    "qwen3_5",
    "qwen3_next",
    "qwen_moe",
    "register_bridge",
    "supported_model_types",
]
