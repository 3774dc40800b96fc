"""What a micro-batch keeps on the device between its forward and backward pass, and what the loss needs on top.

A table of kept tensors a module, in bytes a token; which of them are recomputed instead is part of the table. Sizes
are those of megatron-core's modules with slime's attention and loss; routing is taken to be balanced over experts.
"""

import functools
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slime.plan.parameters import Sizes, layer_rows, local
from slime.utils.layout.chunks import Chunk, PipelineLayout
from slime.utils.log_prob_chunks import rows_per_chunk
from slime.utils.model_shape import DeltaNet, Dense, Experts, GroupedQuery, Latent, LayerShape, ModelShape

FLOAT32 = 4
INT64 = 8


@dataclass(frozen=True)
class Setting:
    """What decides how much a layer keeps. modules: those that selective recomputation does not keep."""

    sizes: Sizes
    sequence_parallel: bool
    width: int  # bytes of an activation's number
    plain_norm: bool  # a norm without a fused kernel keeps its normalised input as well
    plain_glu: bool  # SwiGLU without a fused kernel keeps its two factors as well
    plain_permute: bool  # permutation of tokens without a fused kernel keeps the sort of all T x experts pairs
    full: str | None  # --recompute-method of full recomputation
    full_layers: int
    modules: frozenset[str]
    predicts: bool = True  # frozen multi-token-prediction layers do not run

    @classmethod
    def from_args(cls, a: Namespace) -> "Setting":
        """From Megatron's flags. On a CPU no kernel is fused."""
        cpu = a.accelerator == "cpu"
        full = a.recompute_method if a.recompute_granularity == "full" else None
        selective = a.recompute_granularity == "selective" or getattr(a, "recompute_activations", False)
        return cls(
            sizes=Sizes.from_args(a),
            sequence_parallel=a.sequence_parallel,
            width=2 if a.bf16 or a.fp16 else FLOAT32,
            plain_norm=cpu,
            plain_glu=cpu or not a.bias_swiglu_fusion,
            plain_permute=cpu or not a.moe_permute_fusion,
            full=full,
            full_layers=a.recompute_num_layers or 1,
            modules=frozenset(_names(a.recompute_modules) or ("core_attn",)) if selective else frozenset(),
            predicts=a.enable_mtp_training,
        )

    @property
    def shard(self) -> float:
        """Part of the tokens that one TP rank holds between the tensor-parallel matrices."""
        return 1 / self.sizes.tp if self.sequence_parallel else 1.0


def _names(modules: str | Iterable[str] | None) -> tuple[str, ...]:
    return tuple(modules.split()) if isinstance(modules, str) else tuple(modules or ())


@dataclass(frozen=True)
class Kept:
    """A tensor kept for backward: bytes a token of this rank, and the recompute modules that do without it."""

    name: str
    bytes: float
    recomputed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank. peak = retained + the larger of loss and backward.

    retained: kept by all micro-batches in flight. in_flight: how many whole ones that is. loss: logits and what the
    loss needs at its peak, on the last stage. backward: layers being recomputed, gradients under way. held: what
    mixture layers hold on to after backward with full recomputation, until their next forward pass (`held_bytes`).
    """

    micro_batch: int
    in_flight: float
    retained: int
    loss: int
    backward: int
    held: int = 0

    @property
    def peak(self) -> int:
        return self.retained + max(self.loss, self.backward)


def stage_activations(
    shape: ModelShape,
    layout: PipelineLayout,
    pp_rank: int,
    setting: Setting,
    tokens: int,
    loss: int,
    group: int | None = None,
    micro_batches: int | None = None,
) -> Activations:
    """Activations of pipeline stage `pp_rank` for micro-batches of `tokens` tokens a context-parallel rank.

    loss: the peak of `loss_bytes`, used if this stage computes it. group: micro-batches a virtual stage runs in a row
    (default pp). micro_batches: of one optimizer step, which bounds how many can be in flight.
    """
    chunks = layout.of_rank(pp_rank)
    kept = [chunk_bytes(shape, chunk, setting, tokens) for chunk in chunks]
    counts = in_flight(layout.pp_size, layout.vp_size, pp_rank, group or layout.pp_size, micro_batches)
    retained = sum(count * size for count, size in zip(counts, kept, strict=True))
    backward = max((backward_bytes(shape, chunk, setting, tokens) for chunk in chunks), default=0)
    whole = sum(kept)
    return Activations(
        micro_batch=round(whole),
        in_flight=retained / whole if whole else 0.0,
        retained=round(retained),
        loss=loss if any(chunk.head for chunk in chunks) else 0,
        backward=round(backward),
        held=round(sum(held_bytes(shape, chunk, setting, tokens) for chunk in chunks)),
    )


def in_flight(pp: int, vp: int, pp_rank: int, group: int, micro_batches: int | None = None) -> list[int]:
    """Micro-batches whose activations each chunk of a rank holds at the peak of Megatron's 1F1B schedules.

    Without virtual stages pp - rank. With them 2 (pp - rank - 1) + (vp - 1) group forward passes come before the first
    backward pass, and one more runs; they go through the chunks `group` at a time.
    """
    if vp == 1:
        return [min(pp - pp_rank, micro_batches or pp)]
    passes = 2 * (pp - pp_rank - 1) + (vp - 1) * group + 1
    if micro_batches is not None:
        passes = min(passes, micro_batches * vp)
    counts = [0] * vp
    for number in range(passes):
        counts[number // group % vp] += 1
    return counts


def chunk_bytes(shape: ModelShape, chunk: Chunk, setting: Setting, tokens: int) -> float:
    """Bytes one micro-batch keeps in a (virtual) stage, with recomputation."""
    hidden = shape.hidden * setting.shard * setting.width * tokens
    layers = [shape.layers[i] for i in chunk.layers]
    full = setting.full
    if full == "uniform":  # only the input of every group of layers
        kept = -(-len(layers) // setting.full_layers) * hidden
    elif full == "block":  # only the input of each of the first layers
        first = min(setting.full_layers, len(layers))
        kept = first * hidden + sum(layer_bytes(x, shape.hidden, setting, tokens) for x in layers[first:])
    else:
        kept = sum(layer_bytes(layer, shape.hidden, setting, tokens) for layer in layers)
    mtp_layers = chunk.mtp_layers if setting.predicts else ()  # runs of a layer that repeats, too
    for _ in mtp_layers:  # two norms, their joint input to a projection, the last norm
        kept += 8 * hidden + (hidden if full else layer_bytes(shape.mtp_layer, shape.hidden, setting, tokens))
    return kept + (_norm_copies(setting) * hidden if chunk.head else 0)


def backward_bytes(shape: ModelShape, chunk: Chunk, setting: Setting, tokens: int) -> float:
    """The most that backward needs at once beside what is kept: recomputed layers, gradients under way."""
    layers = [shape.layers[i] for i in chunk.layers]
    if not layers:
        return 0
    under_way = max(_gradients_under_way(layer, shape, setting, tokens) for layer in set(layers))
    if setting.full == "uniform":
        groups = [layers[i : i + setting.full_layers] for i in range(0, len(layers), setting.full_layers)]
    elif setting.full == "block":
        groups = [[layer] for layer in layers[: setting.full_layers]]
    else:
        return under_way + max(_recomputed(layer, shape.hidden, setting, tokens) for layer in set(layers))
    recomputed = max((sum(layer_bytes(x, shape.hidden, setting, tokens) for x in g) for g in groups), default=0)
    return under_way + recomputed + held_bytes(shape, chunk, setting, tokens) / 2


def held_bytes(shape: ModelShape, chunk: Chunk, setting: Setting, tokens: int) -> float:
    """What a chunk's recomputed mixture layers hold on to between their backward and their next forward pass.

    Megatron's dispatcher keeps the routing weights, and with them the graph's leaf: the layer's input and its
    gradient, 2 s H b a token and layer. During backward half of it replaces what was kept of the micro-batch.
    """
    if setting.full is None:
        return 0
    layers = chunk.layers[: setting.full_layers] if setting.full == "block" else chunk.layers
    experts = sum(isinstance(shape.layers[layer].mlp, Experts) for layer in layers)
    return 2 * experts * shape.hidden * setting.shard * setting.width * tokens


def _gradients_under_way(layer: LayerShape, shape: ModelShape, setting: Setting, tokens: int) -> float:
    """Gradients of the MLP's inner activations and of both its ends, and the largest weight gradient before it is
    added to the buffer.

    Most gradients take the place of the kept tensor they belong to; of the inner ones, one of the MLP's width comes on
    top. On an H200, with a vocabulary too small for the loss to be the peak, a step's peak comes out within 4 % for
    dense MLPs and within 8 % for experts.
    """
    sizes, width, hidden = setting.sizes, setting.width, shape.hidden
    if isinstance(layer.mlp, Dense):
        inner = layer.mlp.ffn / sizes.tp
        ends = hidden + hidden * setting.shard
    else:
        routed = layer.mlp.topk * sizes.etp * setting.shard
        inner = layer.mlp.ffn / sizes.etp * routed
        ends = 2 * hidden * routed
    largest = max(local(row, sizes)[0] for row in layer_rows(layer, hidden, shape.norm_vectors))
    return tokens * (inner + ends) * width + largest * width


def _recomputed(layer: LayerShape, hidden: int, setting: Setting, tokens: int) -> float:
    """What selective recomputation brings back while backward is in a layer."""
    return tokens * sum(k.bytes for k in kept_by_layer(layer, hidden, setting) if setting.modules & {*k.recomputed_by})


def layer_bytes(layer: LayerShape, hidden: int, setting: Setting, tokens: int) -> float:
    """Bytes a decoder layer keeps of one micro-batch, without full recomputation."""
    table = kept_by_layer(layer, hidden, setting)
    return tokens * sum(k.bytes for k in table if not setting.modules & {*k.recomputed_by})


def _norm_copies(setting: Setting) -> int:
    """A norm and the matrix behind it keep its input and its output (and the normalised input, see Setting)."""
    return 3 if setting.plain_norm else 2


@functools.lru_cache(maxsize=512)
def kept_by_layer(layer: LayerShape, hidden: int, setting: Setting) -> tuple[Kept, ...]:
    """The tensors one decoder layer keeps. Norms' reciprocal deviations (4 bytes a row) are left out."""
    row = hidden * setting.shard * setting.width
    fused_norm = not isinstance(layer.attention, Latent)
    rows = list(_norm("input norm", row, setting, () if fused_norm else ("layernorm",)))
    match layer.attention:
        case GroupedQuery():
            rows += _grouped_query(layer.attention, setting)
        case Latent():
            rows += _latent(layer.attention, setting)
        case DeltaNet():
            rows += _delta_net(layer.attention, setting)
    if isinstance(layer.mlp, Dense):
        rows += [Kept(k.name, k.bytes, (*k.recomputed_by,)) for k in _norm("MLP norm", row, setting, ("mlp",))]
        rows += _glu("MLP", layer.mlp.ffn / setting.sizes.tp, layer.mlp.gated, setting, ("mlp",))
    else:
        rows += _norm("MLP norm", row, setting, ("layernorm",))
        rows += _experts(layer.mlp, hidden, setting)
    if layer.post_norms:
        rows += [Kept("post norms", 2 * (_norm_copies(setting) - 1) * row)]
    return tuple(rows)


def _norm(name: str, row: float, setting: Setting, recomputed_by: tuple[str, ...]) -> Iterator[Kept]:
    yield Kept(f"{name}: input (the residual stream)", row)
    if setting.plain_norm:
        yield Kept(f"{name}: normalised input", row, recomputed_by)
    yield Kept(f"{name}: output", row, recomputed_by)


def _glu(
    name: str, ffn: float, gated: bool, setting: Setting, recomputed_by: tuple[str, ...], act: tuple[str, ...] = ()
) -> Iterator[Kept]:
    """An MLP's inner tensors for `ffn` local columns a token."""
    width = setting.width
    yield Kept(f"{name}: before activation", (1 + gated) * ffn * width, recomputed_by)
    if setting.plain_glu and gated:
        yield Kept(f"{name}: both factors", 2 * ffn * width, (*recomputed_by, *act))
    yield Kept(f"{name}: after activation", ffn * width, (*recomputed_by, *act))


def _grouped_query(g: GroupedQuery, setting: Setting) -> Iterator[Kept]:
    tp, width = setting.sizes.tp, setting.width
    query, key = g.query_width / tp, max(g.key_width / tp, g.head_dim)
    yield Kept("qkv projection", (query * (1 + g.output_gate) + 2 * key) * width)
    if g.qk_norm != "none":
        yield Kept("q norm: input", query * width)
        if setting.plain_norm:
            yield Kept("q, k norm: normalised inputs", (query + key) * width)
    yield Kept("rotary cosines and sines, for q and k", 4 * g.head_dim * width)
    yield Kept("q with positions", query * width)
    yield Kept("k with positions" if setting.sizes.cp == 1 else "k, v of other ranks", _keys(setting, key) * width)
    if setting.plain_norm:  # attention without a flash kernel works on copies
        yield Kept("attention output, reordered", query * width)
    yield Kept("attention output", query * width)
    yield Kept("attention: log-sum-exp", g.heads / tp * FLOAT32, ("core_attn",))
    if g.output_gate:
        yield Kept("output gate", 2 * query * width)


def _keys(setting: Setting, key: float, local: int = 1) -> float:
    """Keys, and values unless they lie in the projection's output (local 1), that attention keeps a token.

    With context parallelism both are gathered; a rank's front and back piece of a sequence see (cp + 1/2) of its local
    tokens' keys together.
    """
    cp = setting.sizes.cp
    return local * key if cp == 1 else 2 * (cp + 0.5) * key


def _latent(m: Latent, setting: Setting) -> Iterator[Kept]:
    tp, width, shard = setting.sizes.tp, setting.width, setting.shard
    copies = _norm_copies(setting) if m.norm else 1
    query_rank = m.query_rank or 0
    yield Kept("low-rank q, its norm", copies * query_rank * shard * width)
    yield Kept("low-rank kv, its norm", (copies * m.kv_rank + m.rope_dim) * shard * width)
    yield Kept("rotary cosines and sines, for q and k", 4 * m.rope_dim * width)
    heads = m.heads / tp
    if m.indexer is None:
        wide = heads * m.query_dim * width
        yield Kept("q, k, v with positions", wide + _keys(setting, wide, local=2), ("mla_up_proj",))
        yield Kept("attention output, padded to q's width", wide, ("core_attn",))
    else:
        latent = m.kv_rank + m.rope_dim
        yield Kept("q before absorption", heads * m.nope_dim * width, ("mla_up_proj",))
        yield Kept("absorbed q", heads * latent * width, ("mla_up_proj",))
        yield Kept("kv of all context-parallel ranks", setting.sizes.cp * latent * width)
        yield Kept("attention output in latent space", heads * m.kv_rank * width, ("core_attn",))
        if m.indexer.own:
            yield Kept("picked keys (int32)", m.indexer.topk * 4)
    yield Kept("attention: log-sum-exp", heads * FLOAT32, ("core_attn",))
    yield Kept("attention output", heads * m.value_dim * width)


def _delta_net(d: DeltaNet, setting: Setting) -> Iterator[Kept]:
    """Keys and queries are repeated to the value heads; the kernel keeps its gates in float32."""
    tp, width = setting.sizes.tp, setting.width
    key, value, heads = d.key_width / tp, d.value_width / tp, d.value_heads / tp
    repeated = heads * d.key_dim
    yield Kept("input projection", (2 * key + 2 * value + 2 * heads) * width)
    yield Kept("after the convolution", (2 * key + value) * width)
    yield Kept("normalised q, k", 2 * key * width)
    yield Kept("q, k of the value heads, v", (2 * repeated + value) * width)
    yield Kept("gates", 2 * heads * FLOAT32)
    yield Kept("kernel output", value * width)
    yield Kept("gated norm", 2 * value * width, ("gdn_norm_out",))


def _experts(e: Experts, hidden: int, setting: Setting) -> Iterator[Kept]:
    """Balanced routing: every rank's experts get as many (token, expert) pairs as the rank sends, times etp."""
    sizes, width, shard = setting.sizes, setting.width, setting.shard
    pairs = e.topk * shard
    yield Kept("router: scores, picks, weights", shard * e.count * FLOAT32 + pairs * (INT64 + FLOAT32), ("moe",))
    if setting.plain_permute:
        yield Kept("permutation", shard * e.count * INT64 + pairs * INT64, ("moe",))
    received = pairs * sizes.etp
    yield Kept("experts: input", received * hidden * width, ("moe",))
    yield from _glu("experts", received * e.ffn / sizes.etp, e.gated, setting, ("moe",), ("moe_act",))
    if setting.plain_glu:
        yield Kept("experts: before routing weights", received * e.ffn / sizes.etp * width, ("moe", "moe_act"))
    if e.shared_ffn:
        yield from _glu("shared expert", e.shared_ffn / sizes.tp, e.gated, setting, ("moe", "shared_experts"))


def loss_bytes(
    tokens: int,
    response_tokens: int,
    columns: int,
    hidden: int,
    width: int,
    chunk_size: int = -1,
    overlapped: bool = False,
    whole_logits: bool = False,
) -> int:
    """Peak of head and loss on the last stage, for one micro-batch of a context-parallel rank.

    tokens T; response_tokens R <= T, the rows whose log-probabilities are taken; columns C = padded vocabulary / TP;
    chunk_size as --log-probs-chunk-size. In the backward pass: hidden states and their gradient, 2 width T H, and one
    chunk of logits with what goes in and comes out of its head, width min(c, R) (C + 2 H). overlapped: reducing
    gradients early needs zeros in place of the head's gradient, width C H, at the end. whole_logits, for a loss that
    is the user's: in half precision and their float32 copy, (width + 4) T C, or in float32 with their gradient, and
    the output layer's backward pass.
    """
    states = 2 * width * tokens * hidden
    if whole_logits:
        logits = FLOAT32 * tokens * columns
        half = width * tokens * columns if width < FLOAT32 else 0
        return max(2 * logits, logits + half + width * columns * hidden) + states
    rows = min(rows_per_chunk(chunk_size, columns, width), response_tokens)
    chunk = width * rows * (columns + 2 * hidden)
    return states + max(chunk, width * columns * hidden * overlapped)
