"""The way of new weights to the engines: how many bytes, in how many buckets, who sends to whom, how long it takes.

The time is what the network needs at least; gathering, conversion and the engines' own loading come on top.
"""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from slime.plan.parameters import layer_rows
from slime.utils.layout.chunks import Chunk, PipelineLayout
from slime.utils.model_shape import ModelShape

Transport = Literal["tensor", "distributed", "disk", "delta"]
GIGA = 10**9
COPIES = 3  # of a bucket while it is sent: gathered shards, their concatenation, the flattened bytes


@dataclass(frozen=True)
class StageTraffic:
    """What one pipeline stage sends. sender: the training rank that does (with its TP and EP peers' shards)."""

    pp_rank: int
    sender: int
    bytes: int
    buckets: int


@dataclass(frozen=True)
class WeightSync:
    """One weight update.

    receivers: GPUs of engines that take every byte. groups: names and sizes of the process groups that are made for
    it. seconds: bytes / network, stage after stage. extra_gpu_bytes: on a training GPU while a bucket is on its way.
    explains: how the transport works, in one sentence.
    """

    transport: Transport
    explains: str
    bytes: int
    buckets: int
    requests: int
    engines: int
    receivers: int
    stages: tuple[StageTraffic, ...]
    groups: tuple[tuple[str, int], ...]
    seconds: float
    extra_gpu_bytes: int


_EXPLAINS: dict[Transport, str] = {
    "tensor": (
        "colocated: each stage's buckets are gathered over TP and EP and broadcast over PP; every rank hands its "
        "engine a handle to its own copy, and no byte crosses from trainer to engine"
    ),
    "distributed": (
        "separate GPUs: one rank a stage broadcasts its buckets to all engine GPUs (NCCL), one stage after another"
    ),
    "disk": (
        "shared directory: one rank a stage writes its part of a Hugging Face checkpoint, then every engine loads it "
        "all"
    ),
    "delta": "shared directory: only what changed is written; the engines' hosts apply it to their copies",
}


def transport_of(a: Namespace) -> Transport:
    """Which way the weights take, in the order in which the trainer decides it."""
    if a.update_weight_mode == "delta":
        return "delta"
    if a.update_weight_transport == "disk":
        return "disk"
    return "tensor" if a.colocate else "distributed"


def plan_weight_sync(
    a: Namespace,
    shape: ModelShape,
    layout: PipelineLayout,
    *,
    senders: Sequence[int],
    engine_gpus: Sequence[int],
    network_gb_per_s: float,
) -> WeightSync:
    """senders: the sending training rank of each pipeline rank. engine_gpus: GPUs of each engine.

    Weights travel in the trainer's precision (2 bytes, 4 with --fp32), the vocabulary without its padding.
    """
    transport, width = transport_of(a), 4 if a.fp32 else 2
    limit = a.update_weight_buffer_size
    stages = []
    for pp_rank in range(layout.pp_size):
        sizes = list(stage_tensor_bytes(shape, layout.of_rank(pp_rank), width))
        stages.append(StageTraffic(pp_rank, senders[pp_rank], sum(sizes), count_buckets(sizes, limit)))
    total, buckets = sum(stage.bytes for stage in stages), sum(stage.buckets for stage in stages)
    gpus = sum(engine_gpus)
    once = total / (network_gb_per_s * GIGA)
    files = transport in ("disk", "delta")
    return WeightSync(
        transport=transport,
        explains=_EXPLAINS[transport],
        bytes=total,
        buckets=buckets,
        requests=len(engine_gpus) * (1 if files else buckets),
        engines=len(engine_gpus),
        receivers=gpus,
        stages=tuple(stages),
        groups=_groups(transport, layout.pp_size, engine_gpus),
        seconds=2 * once if files else once,  # a file is written and read
        extra_gpu_bytes=0 if not engine_gpus else COPIES * min(limit, max(stage.bytes for stage in stages)),
    )


def _groups(transport: Transport, pp_size: int, engine_gpus: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Process groups between trainers and engines (or, colocated, among the trainers of one engine's GPUs)."""
    if transport == "distributed":
        return tuple((f"slime-pp_{stage}", 1 + sum(engine_gpus)) for stage in range(pp_size))
    if transport == "tensor":
        return tuple((f"engine {index}", gpus) for index, gpus in enumerate(engine_gpus))
    return ()


def stage_tensor_bytes(shape: ModelShape, chunks: Iterable[Chunk], width: int) -> list[int]:
    """Bytes of each whole parameter of a pipeline rank, in the order of its modules; each is sent in one piece.

    Tied embeddings are sent once, by the first stage. Router biases are float32.
    """
    hidden, norm = shape.hidden, shape.norm_vectors * shape.hidden
    sizes: list[int] = []
    for chunk in chunks:
        if chunk.embedding:
            sizes.append(shape.vocab * hidden * width)
        layers = [shape.layers[layer] for layer in chunk.layers]
        layers += [shape.mtp_layer for _ in chunk.mtp_layers[: shape.mtp_layers] if shape.mtp_layer is not None]
        for layer in layers:
            for row in layer_rows(layer, hidden, shape.norm_vectors):
                sizes += [row.elements * width] * row.count
            if getattr(layer.mlp, "router_bias", False):
                sizes.append(layer.mlp.count * 4)
        for _ in chunk.mtp_layers[: shape.mtp_layers]:
            sizes += [norm * width] * 3 + [2 * hidden * hidden * width]
        if chunk.head:
            sizes.append(norm * width)
            if not shape.tied:
                sizes.append(shape.vocab * hidden * width)
    return sizes


def count_buckets(sizes: Iterable[int], limit: int) -> int:
    """Buckets when tensors are joined in order until the next would exceed `limit` bytes; a larger one is alone."""
    buckets, filled = 0, limit + 1
    for size in sizes:
        if filled + size > limit:
            buckets, filled = buckets + 1, 0
        filled += size
    return buckets
