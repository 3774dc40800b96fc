"""Bridges from Hugging Face checkpoints to Megatron models: one registry `model_type -> bridge class`.

A bridge knows the names and the layout of one model family; add one with `register_bridge`.
"""

from slime_plugins.mbridge import dense as dense  # registers the bridges that come with slime
from slime_plugins.mbridge.base import BaseBridge, Checkpoint
from slime_plugins.mbridge.registry import get_bridge, register_bridge, supported_model_types

__all__ = ["BaseBridge", "Checkpoint", "get_bridge", "register_bridge", "supported_model_types"]
