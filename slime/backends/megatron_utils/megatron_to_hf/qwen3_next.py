"""Qwen3-Next: gated delta nets (Megatron's GatedDeltaNet), every fourth layer gated attention, experts."""

from argparse import Namespace
from collections.abc import Sequence

import torch

from slime.backends.megatron_utils.megatron_to_hf.family import (
    GATED_QKV,
    MLP_ROWS,
    MODEL_ROWS,
    PASSED_OVER,
    QK_NORM_ROWS,
    SWAPPED_HALVES,
    UNCHANGED,
    Family,
    MultiTokenPrediction,
    Row,
    Transform,
    attention_rows,
)
from slime.backends.megatron_utils.megatron_to_hf.qwen3moe import QWEN_MOE_ROWS


def in_proj_blocks(args: Namespace) -> tuple[int, int, int, int, int, int]:
    """Rows of Megatron's in_proj: queries, keys, values, output gates (z), write strengths (b), decays (a)."""
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    values = args.linear_num_value_heads * args.linear_value_head_dim
    return keys, keys, values, values, args.linear_num_value_heads, args.linear_num_value_heads


def _conv_blocks(args: Namespace) -> tuple[int, ...]:
    """The convolution goes over queries, keys and values."""
    return in_proj_blocks(args)[:3]


def _split_by_key_head(args: Namespace, param: torch.Tensor) -> Sequence[torch.Tensor]:
    """in_proj -> in_proj_qkvz, in_proj_ba: for each key head its rows of q, k, v and z, and of b and a."""
    parts = [part.unflatten(0, (args.linear_num_key_heads, -1)) for part in param.split(in_proj_blocks(args))]
    return [torch.cat(group, dim=1).flatten(0, 1) for group in (parts[:4], parts[4:])]


def _merge_by_key_head(args: Namespace, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    heads, blocks = args.linear_num_key_heads, in_proj_blocks(args)
    parts: list[torch.Tensor] = []
    for tensor, sizes in zip(tensors, (blocks[:4], blocks[4:]), strict=True):
        by_head = tensor.unflatten(0, (heads, -1)).split([size // heads for size in sizes], dim=1)
        parts += (part.flatten(0, 1) for part in by_head)
    return torch.cat(parts)


_BY_KEY_HEAD = Transform(_split_by_key_head, _merge_by_key_head, in_proj_blocks)
_CONV = Transform(UNCHANGED.split, UNCHANGED.merge, _conv_blocks)


def delta_net_rows(in_proj: Row) -> tuple[Row, ...]:
    """A layer with a gated delta net; `in_proj` is the row of its input projection."""
    return (
        Row("self_attention.in_proj.layer_norm_weight", ("input_layernorm.weight",)),
        in_proj,
        Row("self_attention.conv1d.weight", ("linear_attn.conv1d.weight",), _CONV),
        Row("self_attention.A_log", ("linear_attn.A_log",)),
        Row("self_attention.dt_bias", ("linear_attn.dt_bias",)),
        Row("self_attention.out_norm.weight", ("linear_attn.norm.weight",)),
        Row("self_attention.out_proj.weight", ("linear_attn.out_proj.weight",)),
    )


def prediction_layers(projection: Transform) -> MultiTokenPrediction:
    """Prediction layers beside the model. projection: how mtp.fc relates to Megatron's eh_proj."""
    return MultiTokenPrediction(
        "mtp.",
        "mtp.layers.{depth}.",
        (
            Row("enorm.weight", ("pre_fc_norm_embedding.weight",)),
            Row("hnorm.weight", ("pre_fc_norm_hidden.weight",)),
            Row("eh_proj.weight", ("fc.weight",), projection),
            Row("final_layernorm.weight", ("norm.weight",)),
        ),
    )


GATED_ATTENTION_ROWS = attention_rows(GATED_QKV) + QK_NORM_ROWS
# config.json does not say whether a checkpoint has prediction layers
MTP_PASSED_OVER = (*PASSED_OVER, r"mtp\..*")

QWEN3_NEXT = Family(
    "qwen3_next",
    MODEL_ROWS,
    delta_net_rows(
        Row(
            "self_attention.in_proj.weight",
            ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
            _BY_KEY_HEAD,
        )
    )
    + GATED_ATTENTION_ROWS
    + MLP_ROWS
    + QWEN_MOE_ROWS,
    mtp=prediction_layers(SWAPPED_HALVES),
    passed_over=MTP_PASSED_OVER,
)
