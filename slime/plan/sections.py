"""Small parts of a plan: GPUs, what the model is, who holds which layers and experts, how sequences are cut."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from slime.plan.parameters import Parameters, Sizes, model_parameters, parameters_of_rank
from slime.utils.layout import IndexSharing, PipelineLayout, uses_sparse_attention
from slime.utils.model_shape import Experts, ModelShape


@dataclass(frozen=True)
class Cluster:
    """GPUs of the run. total: both together, the larger of the two when they are shared."""

    trainer_gpus: int
    trainer_nodes: int
    rollout_gpus: int
    total_gpus: int
    nodes: int
    gpus_per_node: int
    colocated: bool


@dataclass(frozen=True)
class ModelFacts:
    """Parameters without padding. active: of those, what one token passes through; with_mtp: MTP layers included."""

    model_type: str | None
    layers: int
    moe_layers: int
    hidden: int
    vocab: int
    padded_vocab: int
    experts: int
    experts_per_token: int
    mtp_layers: int
    parameters: int
    active: int
    with_mtp: int
    uncounted: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds. layers: 0-based, of each of its virtual stages.

    computing: of these, the layers with an indexer of their own (None without shared indices).
    parameters, expert_parameters: of one GPU. experts: routed experts of a layer on one GPU.
    """

    pp_rank: int
    layers: tuple[tuple[int, ...], ...]
    moe_layers: int
    computing: tuple[int, ...] | None
    embedding: bool
    head: bool
    mtp_layers: int
    experts: int
    parameters: int
    expert_parameters: int


@dataclass(frozen=True)
class ContextParallel:
    """How a sequence is cut over `size` ranks, and how they exchange keys and values."""

    size: int
    layout: Literal["whole", "zigzag"]
    exchange: Literal["none", "all-gather", "point-to-point"]
    explains: str


def plan_cluster(a: Namespace) -> Cluster:
    """From the counts of nodes and GPUs; engines behind given addresses count none."""
    trainer = 0 if a.debug_rollout_only else a.actor_num_nodes * a.actor_num_gpus_per_node
    rollout = 0 if a.debug_train_only or a.rollout_external else a.rollout_num_gpus or 0
    total = max(trainer, rollout) if a.colocate else trainer + rollout
    per_node = max(1, a.num_gpus_per_node, a.actor_num_gpus_per_node if trainer else 0)
    return Cluster(
        trainer_gpus=trainer,
        trainer_nodes=a.actor_num_nodes if trainer else 0,
        rollout_gpus=rollout,
        total_gpus=total,
        nodes=max(a.actor_num_nodes if trainer else 0, -(-total // per_node)),
        gpus_per_node=per_node,
        colocated=bool(a.colocate),
    )


def model_facts(a: Namespace, shape: ModelShape, mtp_layers: int) -> ModelFacts:
    """mtp_layers: multi-token-prediction layers that the trainer builds."""
    plain, with_mtp = model_parameters(shape), model_parameters(shape, mtp=True)
    moe = [layer.mlp for layer in shape.layers if isinstance(layer.mlp, Experts)]
    return ModelFacts(
        model_type=a.model_type,
        layers=shape.num_layers,
        moe_layers=len(moe),
        hidden=shape.hidden,
        vocab=shape.vocab,
        padded_vocab=shape.vocab_rows(a.tensor_model_parallel_size),
        experts=moe[0].count if moe else 0,
        experts_per_token=moe[0].topk if moe else 0,
        mtp_layers=mtp_layers,
        parameters=plain.total(),
        active=plain.active(),
        with_mtp=with_mtp.total(),
        uncounted=shape.uncounted,
    )


def plan_stages(
    a: Namespace, shape: ModelShape, layout: PipelineLayout, sizes: Sizes, sharing: IndexSharing | None
) -> tuple[Stage, ...]:
    """One entry a pipeline rank, first to last."""
    shared = sharing is not None and not all(sharing.computes)
    stages = []
    for pp_rank in range(layout.pp_size):
        chunks = layout.of_rank(pp_rank)
        layers = [layer for chunk in chunks for layer in chunk.layers]
        held: Parameters = parameters_of_rank(shape, layout, sizes, pp_rank)
        moe = [shape.layers[i].mlp for i in layers if isinstance(shape.layers[i].mlp, Experts)]
        stages.append(
            Stage(
                pp_rank=pp_rank,
                layers=tuple(chunk.layers for chunk in chunks),
                moe_layers=len(moe),
                computing=tuple(i for i in layers if sharing.computes[i]) if shared else None,
                embedding=any(chunk.embedding for chunk in chunks),
                head=any(chunk.head for chunk in chunks),
                mtp_layers=sum(len(chunk.mtp_layers) for chunk in chunks),
                experts=moe[0].count // sizes.ep if moe else 0,
                parameters=held.total(),
                expert_parameters=held.expert(),
            )
        )
    return tuple(stages)


def context_parallel(a: Namespace) -> ContextParallel:
    """Always zigzag; --allgather-cp, which sparse attention implies, is how keys and values are exchanged."""
    size = a.context_parallel_size
    if size == 1:
        return ContextParallel(1, "whole", "none", "every rank holds whole samples")
    cut = f"a sample is cut into {2 * size} pieces, rank r holds pieces r and {2 * size - 1} - r"
    if uses_sparse_attention(a):
        what = "latent keys, and in layers that choose tokens index keys, are gathered from all ranks"
        return ContextParallel(size, "zigzag", "all-gather", f"{cut}; {what}")
    if a.allgather_cp:
        return ContextParallel(size, "zigzag", "all-gather", f"{cut}; keys and values are gathered from all ranks")
    return ContextParallel(size, "zigzag", "point-to-point", f"{cut}; keys and values go round from rank to rank")


@dataclass(frozen=True)
class CheckpointPlan:
    """Bytes of one checkpoint on disk, and how many the run writes (None if that is not known beforehand)."""

    megatron_bytes: int
    hugging_face_bytes: int
    every: int | None
    count: int | None


def plan_checkpoint(a: Namespace, parameters: int) -> CheckpointPlan:
    """parameters: of everything that the trainer builds.

    Megatron: weights in the trainer's precision and, unless --no-save-optim, the optimizer's float32 numbers, of which
    there are a master copy and two moments (one for SGD and Lion). Hugging Face (--save-hf): weights alone.
    """
    width = 4 if a.fp32 else 2
    optimizer = 0 if a.no_save_optim else 4 * (2 if a.optimizer in ("sgd", "lion") else 3)
    count = None
    if a.save and a.save_interval and a.num_rollout is not None:
        count = -(-a.num_rollout // a.save_interval)
    return CheckpointPlan(
        megatron_bytes=parameters * (width + optimizer) if a.save else 0,
        hugging_face_bytes=parameters * width if a.save_hf else 0,
        every=a.save_interval if a.save else None,
        count=count if a.save else 0,
    )
