"""A model family as a table of rows, Megatron name -> Hugging Face names, and the ways one tensor becomes several."""

import difflib
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Split = Callable[[Namespace, torch.Tensor], Sequence[torch.Tensor]]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def unchanged(args: Namespace, param: torch.Tensor) -> Sequence[torch.Tensor]:
    """One tensor, as it is."""
    return (param,)


def gate_up(args: Namespace, param: torch.Tensor) -> Sequence[torch.Tensor]:
    """linear_fc1 [2 * ffn, hidden] -> gate and up projection [ffn, hidden]."""
    return param.chunk(2)


def qkv(args: Namespace, param: torch.Tensor) -> Sequence[torch.Tensor]:
    """linear_qkv weight [(heads + 2 * groups) * head_dim, hidden] or bias [...] -> q, k, v.

    Megatron stores, for each query group, its queries, then its key, then its value.
    """
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    head_dim = args.kv_channels or args.hidden_size // heads
    queries = heads // groups
    rest = param.shape[1:]
    grouped = param.view(groups, (queries + 2) * head_dim, *rest)
    parts = grouped.split((queries * head_dim, head_dim, head_dim), dim=1)
    return [part.reshape(-1, *rest) for part in parts]


@dataclass(frozen=True)
class Row:
    """`megatron` becomes the tensors `hf` by `split`. In a layer row both are relative to the layer."""

    megatron: str
    hf: tuple[str, ...]
    split: Split = unchanged


@dataclass(frozen=True)
class Family:
    """All parameters that models of the family may have. model_rows: outside the layers; layer_rows: inside."""

    name: str
    model_rows: tuple[Row, ...]
    layer_rows: tuple[Row, ...]

    def convert(self, args: Namespace, name: str, param: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """name: global, without "module."; param: whole, without vocabulary padding. ValueError if unknown."""
        match = _LAYER.fullmatch(name)
        rows, key = (self.layer_rows, match[2]) if match else (self.model_rows, name)
        row = next((row for row in rows if row.megatron == key), None)
        if row is None:
            near = difflib.get_close_matches(key, [row.megatron for row in rows], n=3, cutoff=0.4)
            raise ValueError(
                f"the {self.name} family has no parameter {name}; nearest: {', '.join(near) or 'none'}. "
                "Is --model-name right?"
            )
        prefix = f"model.layers.{match[1]}." if match else ""
        return [(prefix + hf, part) for hf, part in zip(row.hf, row.split(args, param), strict=True)]


def strip_module_prefix(name: str) -> str:
    """Without the "module." that each wrapper (DDP, Float16Module) puts in front."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


MODEL_ROWS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",)),
)

ATTENTION_ROWS = (
    Row("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    Row(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        qkv,
    ),
    Row(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        qkv,
    ),
    Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
)

QK_NORM_ROWS = (
    Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)

MLP_ROWS = (
    Row("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
    Row("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), gate_up),
    Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)
