"""How many parameters a model has, whole and on one rank of a parallel layout: one table of tensors a module.

Exact: names and sizes are those of the modules megatron-core builds. Imports neither torch nor megatron.
"""

import functools
import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from slime.utils.layout.chunks import Chunk, PipelineLayout
from slime.utils.model_shape import Attention, DeltaNet, Dense, Experts, GroupedQuery, Latent, LayerShape, ModelShape

Split = Literal["whole", "tp", "expert"]
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True)
class Row:
    """`count` equal parameter tensors of `elements` each, unsharded, under Megatron's name inside its module.

    whole: every TP rank holds all of it. tp: split over TP. expert: each tensor split over the experts' TP, and the
    `count` tensors dealt out over EP.
    """

    name: str
    elements: int
    split: Split
    count: int = 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of the process groups; dp and edp are what the others leave of the world."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    dp: int
    edp: int

    @classmethod
    def from_args(cls, a: Namespace) -> "Sizes":
        """From Megatron's flags and a.world_size; nothing below 1, an indivisible world rounded down."""
        tp, pp = max(a.tensor_model_parallel_size, 1), max(a.pipeline_model_parallel_size, 1)
        cp, ep = max(a.context_parallel_size, 1), max(a.expert_model_parallel_size, 1)
        etp = max(a.expert_tensor_parallel_size or tp, 1)
        dp, edp = max(1, a.world_size // (tp * pp * cp)), max(1, a.world_size // (etp * ep * pp))
        return cls(tp, pp, cp, ep, etp, dp, edp)

    @property
    def separate_experts(self) -> bool:
        """Whether Megatron reduces expert gradients in groups (and buffers) of their own."""
        return self.ep > 1 or self.etp != self.tp


@dataclass(frozen=True)
class Tensors:
    """`count` equal tensors of `elements` on one rank (or in the whole model)."""

    name: str
    elements: int
    count: int
    expert: bool
    trained: bool

    @property
    def total(self) -> int:
        return self.elements * self.count


@dataclass(frozen=True)
class Parameters:
    """Parameters of one rank, or of a whole model. buffers: float32 numbers of the routers that are no parameters."""

    tensors: tuple[Tensors, ...]
    buffers: int
    active_share: float  # topk / count of the experts, 1.0 without

    def total(self) -> int:
        """Elements of all parameters."""
        return sum(t.total for t in self.tensors)

    def expert(self) -> int:
        """Elements of the routed experts."""
        return sum(t.total for t in self.tensors if t.expert)

    def active(self) -> int:
        """Elements one token is multiplied with: the embedding is only looked up, most experts are not visited."""
        looked_up = [t.total for t in self.tensors if t.name == EMBEDDING]
        multiplied = (
            self.total() - sum(looked_up) if any(t.name == OUTPUT_LAYER for t in self.tensors) else self.total()
        )
        return multiplied - self.expert() + round(self.expert() * self.active_share)

    def trained(self, expert: bool | None = None) -> int:
        """Elements that get gradients; expert: only the routed experts', or only the others'."""
        return sum(t.total for t in self.tensors if t.trained and expert in (None, t.expert))

    def by_module(self) -> dict[str, int]:
        """Name (layer numbers replaced by *) -> elements."""
        out: Counter[str] = Counter()
        for t in self.tensors:
            out[t.name] += t.total
        return dict(out)


def model_parameters(shape: ModelShape, mtp: bool = False) -> Parameters:
    """The whole model, unpadded, tied embeddings once; with `mtp` also its MTP layers."""
    one = Sizes(1, 1, 1, 1, 1, 1, 1)
    everything = Chunk(0, 0, tuple(range(shape.num_layers)), True, True, tuple(range(shape.mtp_layers)) if mtp else ())
    return _collect(shape, [everything], one, shape.vocab, None)


def parameters_of_rank(
    shape: ModelShape,
    layout: PipelineLayout,
    sizes: Sizes,
    pp_rank: int,
    only: Sequence[str] | None = None,
    freeze: Sequence[str] | None = None,
) -> Parameters:
    """What every rank of pipeline stage `pp_rank` holds.

    only, freeze: regular expressions searched in parameter names, as --only-train-params-name-list and
    --freeze-params-name-list (the first wins).
    """
    rules = (tuple(only or ()), tuple(freeze or ())) if only or freeze else None
    return _collect(shape, layout.of_rank(pp_rank), sizes, shape.vocab_rows(sizes.tp), rules)


Rules = tuple[tuple[str, ...], tuple[str, ...]]


def _collect(shape: ModelShape, chunks: Iterable[Chunk], sizes: Sizes, vocab: int, rules: Rules | None) -> Parameters:
    found: Counter[tuple[str, int, bool, bool]] = Counter()
    buffers = 0
    share = 1.0
    for chunk in chunks:
        mtp = chunk.mtp_layers[: shape.mtp_layers]
        layers = [(f"decoder.layers.{layer}.", shape.layers[layer]) for layer in chunk.layers]
        layers += [(f"mtp.layers.{i}.mtp_model_layer.", shape.mtp_layer) for i in range(len(mtp))]
        rows = [("", row) for row in _outside_layers(shape, chunk, len(mtp), vocab)]
        for prefix, layer in layers:
            rows += [(prefix, row) for row in layer_rows(layer, shape.hidden, shape.norm_vectors)]
            if isinstance(layer.mlp, Experts):
                buffers += 2 * layer.mlp.count if layer.mlp.router_bias else 0
                share = layer.mlp.topk / layer.mlp.count
        for prefix, row in rows:
            elements, count = local(row, sizes)
            trained = rules is None or _trained(prefix + row.name, rules)
            name = re.sub(r"\.\d+\.", ".*.", prefix + row.name)
            found[name, elements, row.split == "expert", trained] += count
    tensors = (Tensors(name, n, count, expert, trained) for (name, n, expert, trained), count in found.items())
    return Parameters(tuple(tensors), buffers, share)


def _trained(name: str, rules: Rules) -> bool:
    only, freeze = rules
    return any(re.search(p, name) for p in only) if only else not any(re.search(p, name) for p in freeze)


def local(row: Row, sizes: Sizes) -> tuple[int, int]:
    """(elements of each tensor, number of tensors) that one rank holds of a row."""
    match row.split:
        case "whole":
            return row.elements, row.count
        case "tp":
            return row.elements // sizes.tp, row.count
        case "expert":
            return row.elements // sizes.etp, row.count // sizes.ep


def _outside_layers(shape: ModelShape, chunk: Chunk, mtp_layers: int, vocab: int) -> Iterator[Row]:
    """Embeddings, the last norm and the output layer; MTP layers' own norms and projection."""
    hidden = shape.hidden
    if chunk.embedding or mtp_layers:  # an MTP layer embeds tokens itself
        yield Row(EMBEDDING, vocab * hidden, "tp")
        if shape.positions:
            yield Row("embedding.position_embeddings.weight", shape.positions * hidden, "whole")
    for i in range(mtp_layers):
        for name in ("enorm", "hnorm", "final_layernorm"):
            yield from _norm(f"mtp.layers.{i}.{name}.", hidden, shape.norm_vectors)
        yield Row(f"mtp.layers.{i}.eh_proj.weight", 2 * hidden * hidden, "tp")
    if chunk.head:
        yield from _norm("decoder.final_layernorm.", hidden, shape.norm_vectors)
        if not shape.tied or not chunk.embedding:  # a last stage of its own keeps a copy of tied embeddings
            yield Row(OUTPUT_LAYER, vocab * hidden, "tp")


def _norm(prefix: str, size: int, norm_vectors: int) -> Iterator[Row]:
    """prefix: up to "weight", "...layernorm." or, fused into the matrix behind the norm, "...layer_norm_"."""
    for name in ("weight", "bias")[:norm_vectors]:
        yield Row(prefix + name, size, "whole")


@functools.lru_cache(maxsize=256)
def layer_rows(layer: LayerShape, hidden: int, norm_vectors: int) -> tuple[Row, ...]:
    """The parameter tensors of one decoder layer, unsharded."""
    rows = _attention_rows(layer.attention, hidden, norm_vectors)
    for name in ("post_self_attn_layernorm.", "post_mlp_layernorm.") if layer.post_norms else ():
        rows += _norm(name, hidden, norm_vectors)
    mlp = layer.mlp
    if isinstance(mlp, Dense):
        rows += _norm("mlp.linear_fc1.layer_norm_", hidden, norm_vectors)
        rows += _dense_rows("mlp", mlp.ffn, mlp.gated, hidden)
        if mlp.bias:
            rows.append(Row("mlp.linear_fc1.bias", (1 + mlp.gated) * mlp.ffn, "tp"))
            rows.append(Row("mlp.linear_fc2.bias", hidden, "whole"))
        return tuple(rows)
    rows += _norm("pre_mlp_layernorm.", hidden, norm_vectors)
    rows.append(Row("mlp.router.weight", mlp.count * hidden, "whole"))
    up = (1 + mlp.gated) * mlp.ffn * hidden
    rows.append(Row("mlp.experts.linear_fc1.weight0", up, "expert", mlp.count))
    rows.append(Row("mlp.experts.linear_fc2.weight0", mlp.ffn * hidden, "expert", mlp.count))
    if mlp.shared_ffn:
        rows += _dense_rows("mlp.shared_experts", mlp.shared_ffn, mlp.gated, hidden)
    if mlp.shared_gate:
        rows.append(Row("mlp.shared_experts.gate_weight", hidden, "whole"))
    return tuple(rows)


def _dense_rows(prefix: str, ffn: int, gated: bool, hidden: int) -> list[Row]:
    return [
        Row(f"{prefix}.linear_fc1.weight", (1 + gated) * ffn * hidden, "tp"),
        Row(f"{prefix}.linear_fc2.weight", ffn * hidden, "tp"),
    ]


def _attention_rows(attention: Attention, hidden: int, norm_vectors: int) -> list[Row]:
    match attention:
        case GroupedQuery():
            fused, rows = "linear_qkv", _grouped_query_rows(attention, hidden, norm_vectors)
        case DeltaNet():
            fused, rows = "in_proj", _delta_net_rows(attention, hidden, norm_vectors)
        case Latent():
            fused, rows = "", _latent_rows(attention, hidden, norm_vectors)
    norm = f"self_attention.{fused}.layer_norm_" if fused else "input_layernorm."
    inner = [Row(f"self_attention.{row.name}", row.elements, row.split, row.count) for row in rows]
    return [*_norm(norm, hidden, norm_vectors), *inner]


def _grouped_query_rows(g: GroupedQuery, hidden: int, norm_vectors: int) -> Iterator[Row]:
    width = g.query_width * (1 + g.output_gate) + 2 * g.key_width
    yield Row("linear_qkv.weight", width * hidden, "tp")
    if g.qkv_bias:
        yield Row("linear_qkv.bias", width, "tp")
    if g.qk_norm == "head":
        yield from _norm("q_layernorm.", g.head_dim, norm_vectors)
        yield from _norm("k_layernorm.", g.head_dim, norm_vectors)
    elif g.qk_norm == "full":
        yield from _norm("q_norm.", g.query_width, norm_vectors)
        yield from _norm("k_norm.", g.key_width, norm_vectors)
    yield Row("linear_proj.weight", g.query_width * hidden, "tp")
    if g.out_bias:
        yield Row("linear_proj.bias", hidden, "whole")


def _latent_rows(m: Latent, hidden: int, norm_vectors: int) -> Iterator[Row]:
    """The indexer needs the normalised low-rank query, so that sparse attention has norms of their own."""
    query_width = m.heads * m.query_dim
    q_norm, kv_norm = ("linear_q_up_proj.layer_norm_", "linear_kv_up_proj.layer_norm_")
    if m.indexer is not None:
        q_norm, kv_norm = ("q_layernorm.", "kv_layernorm.")
    if m.query_rank is None:
        yield Row("linear_q_proj.weight", query_width * hidden, "tp")
        if m.norm:  # Megatron fuses a norm into this matrix too, behind the layer's own
            yield from _norm("linear_q_proj.layer_norm_", hidden, norm_vectors)
    else:
        yield Row("linear_q_down_proj.weight", m.query_rank * hidden, "whole")
        yield Row("linear_q_up_proj.weight", query_width * m.query_rank, "tp")
        if m.norm:
            yield from _norm(q_norm, m.query_rank, norm_vectors)
    yield Row("linear_kv_down_proj.weight", (m.kv_rank + m.rope_dim) * hidden, "whole")
    yield Row("linear_kv_up_proj.weight", m.heads * (m.nope_dim + m.value_dim) * m.kv_rank, "tp")
    if m.norm:
        yield from _norm(kv_norm, m.kv_rank, norm_vectors)
    yield Row("linear_proj.weight", m.heads * m.value_dim * hidden, "tp")
    if m.indexer is not None and m.indexer.own:
        index, name = m.indexer, "core_attention.indexer"
        yield Row(f"{name}.linear_wq_b.weight", index.heads * index.head_dim * (m.query_rank or hidden), "whole")
        yield Row(f"{name}.linear_wk.weight", index.head_dim * hidden, "whole")
        yield from _norm(f"{name}.k_norm.", index.head_dim, 2)
        yield Row(f"{name}.linear_weights_proj.weight", index.heads * hidden, "whole")


def _delta_net_rows(d: DeltaNet, hidden: int, norm_vectors: int) -> Iterator[Row]:
    """Megatron's own sharded module: q, k, v, gate z, beta and alpha come from one projection."""
    yield Row("in_proj.weight", (2 * d.key_width + 2 * d.value_width + 2 * d.value_heads) * hidden, "tp")
    yield Row("conv1d.weight", (2 * d.key_width + d.value_width) * d.conv_kernel, "tp")
    yield Row("dt_bias", d.value_heads, "tp")
    yield Row("A_log", d.value_heads, "tp")
    yield from _norm("out_norm.", d.value_dim, norm_vectors)
    yield Row("out_proj.weight", d.value_width * hidden, "tp")


def padded_elements(parameters: Parameters, expert: bool, shards: int, align: int = 64) -> int:
    """Length of Megatron's contiguous buffer over these trained tensors, as its distributed optimizer pads it.

    Every tensor starts at a multiple of `align` elements, the end is a multiple of lcm(shards, 128), `shards` being
    the ranks the buffer is split over. Further buckets add less than that multiple each and are left out.
    """
    chosen = [t for t in parameters.tensors if t.trained and t.expert == expert]
    length = sum(-(-t.elements // align) * align * t.count for t in chosen)
    unit = math.lcm(shards, 128)
    return -(-length // unit) * unit
