"""What a model is made of, layer by layer, read from Megatron's argument names; plan and FLOPs count from it.

Knows no parallel layout (that is `parameters`) and imports neither torch nor megatron.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime.utils.layout.index_sharing import index_sharing, index_sharing_of_config
from slime.utils.layout.moe_layers import moe_layer_pattern

FULL_ATTENTION_INTERVAL = 4  # layers of a hybrid model with linear attention: every fourth attends fully


class ShapeError(ValueError):
    """The arguments do not say how large the model is; the message names the flag that would."""


POST_NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")  # flags that Megatron lacks


@dataclass(frozen=True)
class GroupedQuery:
    """Softmax attention with `groups` key/value heads (multi-head attention: groups == heads)."""

    heads: int
    groups: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    qk_norm: Literal["none", "head", "full"]  # full: one norm over the concatenation of all heads
    output_gate: bool

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.groups * self.head_dim


@dataclass(frozen=True)
class Indexer:
    """The scorer that picks the `topk` keys each query attends to; all ranks of a TP group hold it whole."""

    heads: int
    head_dim: int
    topk: int
    own: bool  # False: this layer reuses the picks of an earlier one and has no parameters of its own


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values come from one vector of kv_rank + rope_dim numbers a token."""

    heads: int
    query_rank: int | None  # None: queries are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: bool
    indexer: Indexer | None

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net: linear attention with a state of key_dim x value_dim a value head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim


Attention = GroupedQuery | Latent | DeltaNet


@dataclass(frozen=True)
class Dense:
    """An MLP; gated: two matrices on the way up (SwiGLU)."""

    ffn: int
    gated: bool
    bias: bool


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `topk` of `count` a token, and an optional shared MLP for every token."""

    count: int
    topk: int
    ffn: int
    gated: bool
    shared_ffn: int  # 0: none
    shared_gate: bool
    router_bias: bool  # a float32 buffer, no parameter


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer. post_norms: further norms behind attention and MLP, before the residual is added."""

    attention: Attention
    mlp: Dense | Experts
    post_norms: bool


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model. `layers` has num_layers entries; an MTP layer holds `mtp_layer` between its own norms."""

    hidden: int
    vocab: int
    vocab_divisor: int  # the padded vocabulary is a multiple of this times TP
    padded_vocab: int | None  # set when the arguments fix it
    tied: bool
    norm_vectors: int  # vectors of a norm: RMSNorm 1, LayerNorm 2
    positions: int  # rows of a learned position embedding, 0 without
    layers: tuple[LayerShape, ...]
    mtp_layers: int
    mtp_layer: LayerShape | None
    uncounted: tuple[str, ...]  # parts of the model that no argument describes

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def vocab_rows(self, tp: int) -> int:
        """Rows of the word embedding over all `tp` ranks, padding included."""
        if self.padded_vocab is not None:
            return self.padded_vocab
        unit = self.vocab_divisor * tp
        return -(-self.vocab // unit) * unit

    @classmethod
    def from_args(cls, a: Namespace) -> "ModelShape":
        """Read Megatron's names (num_layers, hidden_size, ...), `a.spec` for special modules, `a.hf_config` for gaps.

        Raises ShapeError when a size is missing, LayoutError (also a ValueError) for a broken per-layer pattern.
        """
        for flag in ("num_layers", "hidden_size", "num_attention_heads"):
            if not getattr(a, flag):
                raise ShapeError(f"--{flag.replace('_', '-')} is not given and no config.json says it")
        if a.moe_latent_size:
            raise ShapeError(f"--moe-latent-size {a.moe_latent_size}: experts in a latent space are not counted")
        kind = _kind(a)
        attention, mlps = _attention_layers(a, kind), _mlps(a)
        post_norms = kind == "sandwich" or any(getattr(a, name, False) for name in POST_NORMS)
        layers = tuple(LayerShape(att, mlp, post_norms) for att, mlp in zip(attention, mlps, strict=True))
        mtp = a.mtp_num_layers or 0
        return cls(
            hidden=a.hidden_size,
            vocab=_vocabulary(a),
            vocab_divisor=a.make_vocab_size_divisible_by,
            padded_vocab=a.padded_vocab_size,
            tied=not a.untie_embeddings_and_output_weights,
            norm_vectors=1 if a.normalization == "RMSNorm" else 2,
            positions=_learned_positions(a),
            layers=layers,
            mtp_layers=1 if mtp and a.mtp_use_repeated_layer else mtp,
            mtp_layer=_mtp_layer(layers[-1]) if mtp else None,
            uncounted=("the vision tower",) if "_vl" in _spec_text(a) else (),
        )


_KINDS = {
    "glm4": "sandwich",
    "minimax_m2": "full_norm",
    "qwen3_next": "delta_net",
    "qwen3_5": "delta_net",
    "glm5": "sparse",
}


def _spec_text(a: Namespace) -> str:
    spec = a.spec
    return "" if not spec else spec if isinstance(spec, str) else " ".join(map(str, spec))


def _kind(a: Namespace) -> str:
    """Which family's special modules the model has: "", or a value of _KINDS."""
    variant = a.experimental_attention_variant
    if variant is not None:
        return {"dsa": "sparse", "gated_delta_net": "delta_net"}[variant]
    text = _spec_text(a)
    return next((kind for name, kind in _KINDS.items() if f"models.{name}" in text), "")


def _config(a: Namespace) -> Mapping[str, Any]:
    return getattr(a, "hf_config", None) or {}


def _vocabulary(a: Namespace) -> int:
    size = a.vocab_size or _config(a).get("vocab_size")
    if not size:
        raise ShapeError("the vocabulary size is unknown: pass --vocab-size, or --hf-checkpoint with a config.json")
    return int(size)


def _learned_positions(a: Namespace) -> int:
    learned = a.position_embedding_type == "learned_absolute" and a.add_position_embedding
    if not learned or getattr(a, "use_rotary_position_embeddings", False):
        return 0
    return a.max_position_embeddings or 0


def _attention_layers(a: Namespace, kind: str) -> list[Attention]:
    if a.multi_latent_attention:
        return _latent_layers(a, kind)
    full = _grouped_query(a, kind)
    if kind != "delta_net":
        return [full] * a.num_layers
    linear = DeltaNet(
        key_heads=_linear_size(a, "linear_num_key_heads"),
        value_heads=_linear_size(a, "linear_num_value_heads"),
        key_dim=_linear_size(a, "linear_key_head_dim"),
        value_dim=_linear_size(a, "linear_value_head_dim"),
        conv_kernel=_linear_size(a, "linear_conv_kernel_dim"),
    )
    return [linear if is_linear else full for is_linear in _linear_pattern(a)]


def _grouped_query(a: Namespace, kind: str) -> GroupedQuery:
    norm: Literal["none", "head", "full"] = "none"
    if a.qk_layernorm:
        norm = "full" if kind == "full_norm" else "head"
    return GroupedQuery(
        heads=a.num_attention_heads,
        groups=a.num_query_groups if a.group_query_attention else a.num_attention_heads,
        head_dim=a.kv_channels or a.hidden_size // a.num_attention_heads,
        qkv_bias=a.add_bias_linear or a.add_qkv_bias,
        out_bias=a.add_bias_linear,
        qk_norm=norm,
        output_gate=a.attention_output_gate,
    )


def _latent_layers(a: Namespace, kind: str) -> list[Attention]:
    def layer(indexer: Indexer | None) -> Latent:
        return Latent(
            heads=a.num_attention_heads,
            query_rank=a.q_lora_rank,
            kv_rank=a.kv_lora_rank,
            nope_dim=a.qk_head_dim,
            rope_dim=a.qk_pos_emb_head_dim,
            value_dim=a.v_head_dim,
            norm=a.qk_layernorm,
            indexer=indexer,
        )

    if kind != "sparse":
        return [layer(None)] * a.num_layers
    sizes = {name: _required(a, f"dsa_indexer_{name}", f"index_{name}") for name in ("n_heads", "head_dim", "topk")}
    with_and_without = {
        own: layer(Indexer(sizes["n_heads"], sizes["head_dim"], sizes["topk"], own)) for own in (True, False)
    }
    return [with_and_without[own] for own in _computing_layers(a)]


def _computing_layers(a: Namespace) -> tuple[bool, ...]:
    sharing = None
    if a.dsa_indexer_topk_freq == 1 and _config(a):
        sharing = index_sharing_of_config(dict(_config(a)))
    sharing = sharing or index_sharing(a)
    computes = sharing.computes if sharing is not None else (True,) * a.num_layers
    return computes[: a.num_layers]


def _linear_size(a: Namespace, name: str) -> int:
    """config.json where there is one: Megatron's flags for linear attention have defaults, which say nothing."""
    return int(_config(a).get(name) or getattr(a, name))


def _linear_pattern(a: Namespace) -> list[bool]:
    """Per layer, whether it attends linearly: --linear-attention-freq, config.json's layer_types, or 3 of every 4."""
    freq, types = a.linear_attention_freq, _config(a).get("layer_types")
    if isinstance(freq, list | tuple):
        pattern = [bool(entry) for entry in freq]
    elif freq is None and types:
        pattern = [kind == "linear_attention" for kind in types]
    else:
        interval = int(freq or _config(a).get("full_attention_interval") or FULL_ATTENTION_INTERVAL)
        pattern = [(layer + 1) % interval != 0 for layer in range(a.num_layers)]
    if len(pattern) < a.num_layers:
        raise ShapeError(f"{len(pattern)} layer types are listed for --num-layers {a.num_layers}")
    return pattern[: a.num_layers]


def _required(a: Namespace, dest: str, key: str) -> int:
    value = getattr(a, dest, None) or _config(a).get(key)
    if not value:
        raise ShapeError(f"--{dest.replace('_', '-')} is needed: the sparse attention's sizes are unknown without it")
    return int(value)


def _mlps(a: Namespace) -> list[Dense | Experts]:
    dense = Dense(ffn=_ffn(a), gated=a.swiglu, bias=a.add_bias_linear)
    if not a.num_experts:
        return [dense] * a.num_layers
    if a.add_bias_linear:
        raise ShapeError("experts with biases are not counted: pass --disable-bias-linear")
    shared = a.moe_shared_expert_intermediate_size or 0
    experts = Experts(
        count=a.num_experts,
        topk=a.moe_router_topk,
        ffn=a.moe_ffn_hidden_size or _ffn(a),
        gated=a.swiglu,
        shared_ffn=shared,
        shared_gate=bool(shared and a.moe_shared_expert_gate),
        router_bias=a.moe_router_enable_expert_bias,
    )
    return [experts if is_moe else dense for is_moe in moe_layer_pattern(a.moe_layer_freq, a.num_layers)]


def _ffn(a: Namespace) -> int:
    """--ffn-hidden-size or Megatron's default for it: 4 h, or two thirds of that in whole 64s for gated MLPs."""
    if a.ffn_hidden_size:
        return a.ffn_hidden_size
    return int(4 * a.hidden_size * 2 / 3 / 64) * 64 if a.swiglu else 4 * a.hidden_size


def _mtp_layer(last: LayerShape) -> LayerShape:
    """Megatron repeats the last decoder layer; numbered from 1 again, a sparse one computes its own picks."""
    attention = last.attention
    if isinstance(attention, Latent) and attention.indexer is not None:
        indexer = Indexer(attention.indexer.heads, attention.indexer.head_dim, attention.indexer.topk, own=True)
        attention = Latent(**{**vars(attention), "indexer": indexer})
    return LayerShape(attention, last.mlp, last.post_norms)
