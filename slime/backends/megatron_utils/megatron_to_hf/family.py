"""A model family as a table of rows, Megatron name <-> Hugging Face names, read in both directions.

Knows neither Megatron nor a process group: tensors come whole (TP-gathered), names are global.
"""

import difflib
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

_DECODER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP = re.compile(r"mtp\.layers\.(\d+)\.(mtp_model_layer\.)?(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


@dataclass(frozen=True)
class Transform:
    """How one Megatron tensor becomes several Hugging Face tensors, and back. `merge` is the exact inverse of `split`.

    All get the arguments (or a TransformerConfig) for the model's dimensions. blocks: where a Megatron tensor holds
    several matrices one after the other along the dimension that tensor parallelism splits, their sizes (only the
    ratios count): each is split for itself, so that a rank holds a share of every one.
    """

    split: Callable[[Namespace, torch.Tensor], Sequence[torch.Tensor]]
    merge: Callable[[Namespace, Sequence[torch.Tensor]], torch.Tensor]
    blocks: Callable[[Namespace], Sequence[int]] | None = None


def _split_qkv(args: Namespace, param: torch.Tensor) -> Sequence[torch.Tensor]:
    """linear_qkv weight [(heads + 2 * groups) * head_dim, hidden] or bias [...] -> q, k, v.

    Megatron stores, for each query group, its queries, then its key, then its value.
    """
    groups, queries, head_dim = _heads(args)
    rest = param.shape[1:]
    grouped = param.view(groups, (queries + 2) * head_dim, *rest)
    parts = grouped.split((queries * head_dim, head_dim, head_dim), dim=1)
    return [part.reshape(-1, *rest) for part in parts]


def _merge_qkv(args: Namespace, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    groups = _heads(args)[0]
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)


def _split_gated_qkv(args: Namespace, param: torch.Tensor) -> Sequence[torch.Tensor]:
    """As `_split_qkv` for attention with an output gate.

    Megatron stores, for each query group, its queries, their gates, its key, its value; Hugging Face's q_proj holds
    each head's query rows followed by its gate rows: [2 * heads * head_dim, hidden].
    """
    groups, queries, head_dim = _heads(args)
    rest = param.shape[1:]
    grouped = param.view(groups, (2 * queries + 2) * head_dim, *rest)
    q, k, v = grouped.split((2 * queries * head_dim, head_dim, head_dim), dim=1)
    q = q.view(groups, 2, queries, head_dim, *rest).transpose(1, 2)
    return [part.reshape(-1, *rest) for part in (q, k, v)]


def _merge_gated_qkv(args: Namespace, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    groups, queries, head_dim = _heads(args)
    q, k, v = parts
    rest = q.shape[1:]
    q = q.view(groups, queries, 2, head_dim, *rest).transpose(1, 2)
    return torch.cat([part.reshape(groups, -1, *rest) for part in (q, k, v)], dim=1).reshape(-1, *rest)


def _heads(args: Namespace) -> tuple[int, int, int]:
    """(query groups, queries a group, head dimension)."""
    heads = args.num_attention_heads
    groups = args.num_query_groups if getattr(args, "group_query_attention", True) else heads
    return groups, heads // groups, args.kv_channels or args.hidden_size // heads


def _swap_columns(param: torch.Tensor) -> torch.Tensor:
    first, second = param.chunk(2, dim=1)
    return torch.cat((second, first), dim=1)


UNCHANGED = Transform(lambda args, param: (param,), lambda args, parts: parts[0])
# linear_fc1 [2 * ffn, hidden] <-> gate and up projection [ffn, hidden]
GATE_UP = Transform(
    lambda args, param: param.chunk(2), lambda args, parts: torch.cat(tuple(parts)), lambda args: (1, 1)
)
# the same in a checkpoint that holds both in one tensor
PACKED_GATE_UP = replace(UNCHANGED, blocks=GATE_UP.blocks)
QKV = Transform(_split_qkv, _merge_qkv)
GATED_QKV = Transform(_split_gated_qkv, _merge_gated_qkv)
# eh_proj [hidden, 2 * hidden]: Megatron reads (embedding, hidden state); some checkpoints hold the halves swapped
SWAPPED_HALVES = Transform(lambda args, param: (_swap_columns(param),), lambda args, parts: _swap_columns(parts[0]))


@dataclass(frozen=True)
class Row:
    """`megatron` <-> the tensors `hf`, in a layer row relative to the layer. {expert} is the number of an expert."""

    megatron: str
    hf: tuple[str, ...]
    transform: Transform = UNCHANGED


@dataclass(frozen=True)
class MultiTokenPrediction:
    """Where a family keeps its multi-token-prediction layers.

    prefix: of `rows` (norms and the projection of embedding and hidden state). layer_prefix: of the transformer layer.
    In both {depth} is the layer's 0-based depth and {layer} = number of decoder layers + depth.
    """

    prefix: str
    layer_prefix: str
    rows: tuple[Row, ...]


# Buffers of old checkpoints; copies of embedding and head beside a prediction layer, which shares the model's own.
PASSED_OVER = (r".*\.rotary_emb\.inv_freq", r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")


@dataclass(frozen=True)
class Family:
    """All parameters that models of the family may have. model_rows: outside the layers; layer_rows: inside.

    passed_over: regular expressions of checkpoint tensors that have no place in the trained model, beside prediction
    layers that are not trained: buffers, copies, parts that are not the language model.
    """

    name: str
    model_rows: tuple[Row, ...]
    layer_rows: tuple[Row, ...]
    layer_prefix: str = "model.layers.{layer}."
    mtp: MultiTokenPrediction | None = None
    passed_over: tuple[str, ...] = PASSED_OVER
    _by_name: dict[str, dict[str, Row]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tables = {"model": self.model_rows, "layer": self.layer_rows, "mtp": self.mtp.rows if self.mtp else ()}
        for table, rows in tables.items():
            self._by_name[table] = {row.megatron: row for row in rows}
            if len(self._by_name[table]) != len(rows):
                raise ValueError(f"the {self.name} family names a parameter twice in its {table} rows")

    def hf_names(self, args: Namespace, name: str) -> list[str]:
        """The Hugging Face tensors of the Megatron parameter `name` (global, no "module."). ValueError if unknown."""
        return self._find(args, name)[1]

    def convert(self, args: Namespace, name: str, param: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Megatron -> Hugging Face. param: whole, without vocabulary padding. ValueError for an unknown name."""
        row, hf_names = self._find(args, name)
        return list(zip(hf_names, row.transform.split(args, param), strict=True))

    def restore(self, args: Namespace, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hugging Face -> Megatron: the whole parameter `name` from the tensors of `hf_names`, in that order."""
        row, hf_names = self._find(args, name)
        if len(tensors) != len(hf_names):
            raise ValueError(f"{name} is made of {len(hf_names)} tensors ({', '.join(hf_names)}), got {len(tensors)}")
        return row.transform.merge(args, tensors)

    def tp_blocks(self, args: Namespace, name: str) -> tuple[int, ...]:
        """Relative sizes of the blocks of `name` that tensor parallelism splits one by one; (1,) for one matrix."""
        blocks = self._find(args, name)[0].transform.blocks
        return (1,) if blocks is None else tuple(blocks(args))

    def mtp_prefixes(self, num_layers: int, depth: int) -> tuple[str, ...]:
        """How the Hugging Face names of a prediction layer begin. num_layers: of the decoder; depth: 0-based."""
        if self.mtp is None:
            return ()
        places = {"depth": depth, "layer": num_layers + depth}
        return tuple({prefix.format(**places) for prefix in (self.mtp.prefix, self.mtp.layer_prefix)})

    def _find(self, args: Namespace, name: str) -> tuple[Row, list[str]]:
        table, key, prefix = self._place(args, name)
        places = {}
        if match := _EXPERT.fullmatch(key):
            key, places["expert"] = match[1] + "{expert}", match[2]
        row = self._by_name[table].get(key)
        if row is None:
            raise ValueError(self._unknown(name, key, self._by_name[table]))
        return row, [prefix + hf.format(**places) for hf in row.hf]

    def _place(self, args: Namespace, name: str) -> tuple[str, str, str]:
        """(table, name within it, prefix of the Hugging Face names)."""
        if match := _DECODER.fullmatch(name):
            return "layer", match[2], self.layer_prefix.format(layer=match[1])
        match = _MTP.fullmatch(name)
        if match is None or self.mtp is None:
            return "model", name, ""
        where = {"depth": match[1], "layer": args.num_layers + int(match[1])}
        if match[2]:
            return "layer", match[3], self.mtp.layer_prefix.format(**where)
        return "mtp", match[3], self.mtp.prefix.format(**where)

    def _unknown(self, name: str, key: str, known: dict[str, Row]) -> str:
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.4)
        sandwich = key in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
        hint = " Norms after attention and MLP belong to dense GLM-4 (glm4)." if sandwich else ""
        return (
            f"the {self.name} family has no parameter {name}; nearest: {', '.join(near) or 'none'}.{hint} "
            "Is --model-name right?"
        )


def strip_module_prefix(name: str) -> str:
    """Without the "module." that each wrapper (DDP, Float16Module) puts in front."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def rows(prefix: str, hf_prefix: str, names: str) -> Iterator[Row]:
    """Rows of parameters that are called the same on both sides, but for a prefix. names: separated by spaces."""
    return (Row(prefix + name, (hf_prefix + name,)) for name in names.split())


MODEL_ROWS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",)),
)

OUTPUT_ROW = Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",))


def attention_rows(transform: Transform = QKV) -> tuple[Row, ...]:
    """Grouped-query attention with a fused norm; the norm may also stand alone."""
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        Row("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
        Row("self_attention.linear_qkv.weight", tuple(f"{part}.weight" for part in parts), transform),
        Row("self_attention.linear_qkv.bias", tuple(f"{part}.bias" for part in parts), transform),
        OUTPUT_ROW,
    )


QK_NORM_ROWS = (
    Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)

MLP_ROWS = (
    Row("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
    Row("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATE_UP),
    Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)


def moe_rows(module: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple:
    """Routed experts and their router, under `module` of the checkpoint's layer."""
    expert = f"{module}.experts.{{expert}}."
    return (
        Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
        Row("mlp.router.weight", (f"{module}.gate.weight",)),
        Row(
            "mlp.experts.linear_fc1.weight{expert}",
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"),
            GATE_UP,
        ),
        Row("mlp.experts.linear_fc2.weight{expert}", (f"{expert}{down}.weight",)),
    )


EXPERT_BIAS_ROW = Row("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",))


def shared_expert_rows(module: str) -> tuple[Row, ...]:
    """The expert that every token passes. module: "mlp.shared_experts" or "mlp.shared_expert"."""
    return (
        Row(
            "mlp.shared_experts.linear_fc1.weight", (f"{module}.gate_proj.weight", f"{module}.up_proj.weight"), GATE_UP
        ),
        Row("mlp.shared_experts.linear_fc2.weight", (f"{module}.down_proj.weight",)),
    )


# Layers of DeepSeek, GLM-4.5 and later: an extra decoder layer in the checkpoint, numbered after the last one.
MTP_AS_LAYER = MultiTokenPrediction(
    "model.layers.{layer}.",
    "model.layers.{layer}.",
    (
        *rows("", "", "eh_proj.weight enorm.weight hnorm.weight"),
        Row("final_layernorm.weight", ("shared_head.norm.weight",)),
    ),
)
