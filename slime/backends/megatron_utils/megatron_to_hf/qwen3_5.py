"""Qwen3.5, dense and with experts: Qwen3-Next's layers, input projections of the delta nets in four tensors."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch

from slime.backends.megatron_utils.megatron_to_hf.family import (
    MLP_ROWS,
    MODEL_ROWS,
    UNCHANGED,
    Family,
    Row,
    Transform,
)
from slime.backends.megatron_utils.megatron_to_hf.qwen3_next import (
    GATED_ATTENTION_ROWS,
    MTP_PASSED_OVER,
    delta_net_rows,
    in_proj_blocks,
    prediction_layers,
)
from slime.backends.megatron_utils.megatron_to_hf.qwen3moe import QWEN_MOE_ROWS


def _split_in_proj(args: Namespace, param: torch.Tensor) -> Sequence[torch.Tensor]:
    """in_proj -> in_proj_qkv, in_proj_z, in_proj_b, in_proj_a."""
    q, k, v, z, b, a = in_proj_blocks(args)
    return param.split((q + k + v, z, b, a))


_IN_PROJ = Transform(_split_in_proj, lambda args, parts: torch.cat(tuple(parts)), in_proj_blocks)
_PROJECTIONS = tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))

# A checkpoint of the language model alone.
QWEN3_5_TEXT = Family(
    "qwen3_5_text",
    MODEL_ROWS,
    delta_net_rows(Row("self_attention.in_proj.weight", _PROJECTIONS, _IN_PROJ))
    + GATED_ATTENTION_ROWS
    + MLP_ROWS
    + QWEN_MOE_ROWS,
    mtp=prediction_layers(UNCHANGED),
    passed_over=MTP_PASSED_OVER,
)


def _beside_vision(row: Row) -> Row:
    return replace(row, hf=tuple(name.replace("model.", "model.language_model.", 1) for name in row.hf))


# The published checkpoints: the language model beside a vision tower.
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    name="qwen3_5",
    model_rows=tuple(_beside_vision(row) for row in MODEL_ROWS),
    layer_prefix="model.language_model.layers.{layer}.",
    passed_over=(*MTP_PASSED_OVER, r"model\.visual\..*"),
)
