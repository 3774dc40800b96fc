"""Floating point operations of a decoder-only model on whole sequences, for balancing, metrics and benchmarks.

Matrix products, a multiplication and an addition as 2, that the model needs: padding of the vocabulary, recomputation,
norms, softmax and rotary positions are left out. Pure Python; imports neither torch nor megatron.
"""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass

from slime.utils.model_shape import (
    Attention,
    DeltaNet,
    Dense,
    Experts,
    GroupedQuery,
    Indexer,
    Latent,
    LayerShape,
    ModelShape,
)

# Dense bf16 TFLOP/s of the tensor cores, from the vendors' data sheets; the first name that the device's contains.
_PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("RTX 4090", 165.0),
)


@dataclass(frozen=True)
class Cost:
    """Operations a token, a causal pair of tokens (s (s + 1) / 2 of them), and a pair of a token with a chosen one.

    Chosen: each token attends to the `topk` best of those before it and itself, or to all while there are no more.
    """

    token: int = 0
    pair: int = 0
    chosen: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.token + other.token, self.pair + other.pair, self.chosen + other.chosen)

    def of(self, length: int, topk: int) -> int:
        """One sequence."""
        within = min(length, topk)
        chosen = within * (within + 1) // 2 + within * (length - within)
        return self.token * length + self.pair * length * (length + 1) // 2 + self.chosen * chosen


@dataclass(frozen=True)
class ModelFlops:
    """Forward costs of a model: decoder layers, the indexers among them, and the head, which only scored tokens pass.

    prediction: one depth of multi-token prediction without its head, prediction_indexer the indexer in it.
    """

    decoder: Cost
    indexers: Cost
    prediction: Cost
    prediction_indexer: Cost
    head: int
    topk: int

    @classmethod
    def of(cls, shape: ModelShape) -> "ModelFlops":
        """Count every layer of the model once."""
        decoder = indexers = prediction = indexer = Cost()
        for layer in shape.layers:
            decoder += layer_cost(layer, shape.hidden)
            indexers += indexer_cost(layer.attention, shape.hidden)
        if shape.mtp_layer is not None:
            join = Cost(token=2 * (2 * shape.hidden) * shape.hidden)
            indexer = indexer_cost(shape.mtp_layer.attention, shape.hidden)
            prediction = join + layer_cost(shape.mtp_layer, shape.hidden) + indexer
        topk = max((found.topk for layer in shape.layers if (found := _indexer(layer.attention))), default=0)
        return cls(decoder, indexers, prediction, indexer, 2 * shape.hidden * shape.vocab, topk)

    def forward(self, lengths: Iterable[int], scored_tokens: int | None = None, prediction_depths: int = 0) -> int:
        """A forward pass over sequences of these lengths. scored_tokens: those that pass the head, by default all."""
        lengths = list(lengths)
        scored = sum(lengths) if scored_tokens is None else scored_tokens
        body = sum((self.decoder + self.indexers).of(length, self.topk) for length in lengths)
        depth = sum(self.prediction.of(length, self.topk) for length in lengths) if prediction_depths else 0
        return body + prediction_depths * depth + (1 + prediction_depths) * self.head * scored

    def training(
        self,
        lengths: Iterable[int],
        scored_tokens: int | None = None,
        prediction_depths: int = 0,
        train_indexers: bool = False,
    ) -> int:
        """Forward and backward: three times the forward pass; once for indexers that do not train; twice for the head
        behind prediction layers, which they leave as it is.
        """
        lengths = list(lengths)
        scored = sum(lengths) if scored_tokens is None else scored_tokens
        total = 3 * self.forward(lengths, scored, prediction_depths) - prediction_depths * self.head * scored
        if not train_indexers:
            frozen = [self.indexers, *[self.prediction_indexer] * prediction_depths]
            total -= 2 * sum(cost.of(length, self.topk) for cost in frozen for length in lengths)
        return total


def flops_of_sequences(lengths: Iterable[int], args: Namespace) -> list[int]:
    """Forward FLOPs of each sequence on its own, for a model described by Megatron's arguments.

    Raises ShapeError when they do not say how large it is.
    """
    model = ModelFlops.of(ModelShape.from_args(args))
    total = model.decoder + model.indexers + Cost(token=model.head)
    return [total.of(length, model.topk) for length in lengths]


def layer_cost(layer: LayerShape, hidden: int) -> Cost:
    """A decoder layer without its indexer."""
    return attention_cost(layer.attention, hidden) + Cost(token=mlp_flops(layer.mlp, hidden))


def attention_cost(attention: Attention, hidden: int, absorbed: bool | None = None) -> Cost:
    """Projections, scores and weighted values.

    absorbed: latent attention on the compressed keys and values themselves; by default where attention is sparse.
    """
    if isinstance(attention, GroupedQuery):
        queries = attention.query_width * (2 if attention.output_gate else 1)
        projections = 2 * hidden * (queries + 2 * attention.key_width + attention.query_width)
        return Cost(token=projections, pair=4 * attention.query_width)
    if isinstance(attention, DeltaNet):
        return Cost(token=_delta_net_flops(attention, hidden))
    return _latent_cost(attention, hidden, attention.indexer is not None if absorbed is None else absorbed)


def _latent_cost(a: Latent, hidden: int, absorbed: bool) -> Cost:
    query_width = a.heads * a.query_dim
    query = a.query_rank * (hidden + query_width) if a.query_rank else hidden * query_width
    key_value = hidden * (a.kv_rank + a.rope_dim)
    # The matrices that expand keys and values, or that fold queries in and values out: the same products a token.
    expand = a.kv_rank * a.heads * (a.nope_dim + a.value_dim)
    output = a.heads * a.value_dim * hidden
    widths = 2 * a.kv_rank + a.rope_dim if absorbed else a.query_dim + a.value_dim
    each = 2 * a.heads * widths
    token = 2 * (query + key_value + expand + output)
    return Cost(token, chosen=each) if a.indexer is not None else Cost(token, pair=each)


def indexer_cost(attention: Attention, hidden: int) -> Cost:
    """The indexer of a sparse attention layer: every causal pair is scored. Nothing where picks are reused."""
    indexer = _indexer(attention)
    if indexer is None or not indexer.own:
        return Cost()
    query = (attention.query_rank or hidden) * indexer.heads * indexer.head_dim
    token = 2 * (query + hidden * (indexer.head_dim + indexer.heads))
    return Cost(token, pair=2 * indexer.heads * (indexer.head_dim + 1))  # scores, and their weighted sum over heads


def _indexer(attention: Attention) -> Indexer | None:
    return attention.indexer if isinstance(attention, Latent) else None


def _delta_net_flops(a: DeltaNet, hidden: int) -> int:
    """A token: projections, the short convolution, and the recurrence S <- g S + k (v - k^T S) b, o = q^T S, whose
    three products with the key_dim x value_dim state count once a value head (a chunked form does more).
    """
    projections = hidden * (2 * a.key_width + 2 * a.value_width + 2 * a.value_heads) + a.value_width * hidden
    convolution = a.conv_kernel * (2 * a.key_width + a.value_width)
    return 2 * (projections + convolution + 3 * a.value_heads * a.key_dim * a.value_dim)


def mlp_flops(mlp: Dense | Experts, hidden: int) -> int:
    """A token's MLP: dense, or router, its topk experts and the shared one."""
    matrices = 3 if mlp.gated else 2
    if isinstance(mlp, Dense):
        return 2 * hidden * mlp.ffn * matrices
    columns = (mlp.topk * mlp.ffn + mlp.shared_ffn) * matrices
    return 2 * hidden * (columns + mlp.count + (1 if mlp.shared_gate else 0))


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 TFLOP/s of a device as CUDA names it; None for one that is not in the table."""
    return next((peak for name, peak in _PEAK_TFLOPS if name in device_name), None)
