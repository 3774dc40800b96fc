"""Which engine sits on which GPUs, how it is parallel inside, and which router it answers to."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from slime.utils.arguments.checks.engine_shape import SPANNING_BACKENDS
from slime.utils.layout.engine_slots import PlacedEngine
from slime.utils.layout.errors import LayoutError
from slime.utils.sglang_config import ServerGroup, ServerModel, Topology, topology


@dataclass(frozen=True)
class EngineParallel:
    """An engine's sizes, in SGLang's terms: tp x pp GPUs; attention and experts split the tp ranks differently.

    dp: data-parallel groups of attention, 1 without --sglang-enable-dp-attention. cp: its context parallelism.
    """

    tp: int
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    moe_dp: int = 1

    @property
    def attention_tp(self) -> int:
        """Ranks that split the attention heads of one sequence."""
        return self.tp // self.dp // self.cp

    @property
    def expert_tp(self) -> int:
        """Ranks that split one expert."""
        return self.tp // self.moe_dp // self.ep


@dataclass(frozen=True)
class GpuRank:
    """What one GPU of an engine is. slot: its index among the GPUs of the run; the rest: its rank on each axis."""

    slot: int
    pp: int
    tp: int
    attention_dp: int
    attention_tp: int
    moe_dp: int
    ep: int
    expert_tp: int


@dataclass(frozen=True)
class EngineNode:
    """The part of an engine on one node. node: index of the machine. gpus: its devices there, consecutive."""

    node_rank: int
    node: int
    gpus: range
    slots: range


@dataclass(frozen=True)
class Engine:
    """One engine: a server on its first node, which answers HTTP, and helpers on the others.

    group: index in `Topology.groups`. shares_trainer_gpus: it must give memory back while the trainers work.
    """

    rank: int
    model: str
    group: int
    worker_type: str
    nodes: tuple[EngineNode, ...]
    parallel: EngineParallel
    update_weights: bool
    shares_trainer_gpus: bool

    @property
    def slots(self) -> range:
        """Its GPUs among those of the run."""
        return range(self.nodes[0].slots.start, self.nodes[-1].slots.stop)

    @property
    def num_gpus(self) -> int:
        """GPUs on all its nodes."""
        return len(self.slots)

    def gpu_ranks(self) -> tuple[GpuRank, ...]:
        """What each of its GPUs is, in the order of `slots`."""
        return tuple(rank for node in self.nodes for rank in self._ranks_of(node))

    def _ranks_of(self, node: EngineNode) -> list[GpuRank]:
        """SGLang 0.5.17: nodes hold whole pipeline stages, or parts of one; tp ranks count fastest within a node."""
        p, nnodes = self.parallel, len(self.nodes)
        stages_here, nodes_per_stage = max(p.pp // nnodes, 1), max(nnodes // p.pp, 1)
        tp_here = p.tp // nodes_per_stage
        first_stage = stages_here * (node.node_rank // nodes_per_stage)
        first_tp = tp_here * (node.node_rank % nodes_per_stage)
        return [
            self._rank(node.slots.start + i, first_stage + i // tp_here, first_tp + i % tp_here)
            for i in range(stages_here * tp_here)
        ]

    def _rank(self, slot: int, pp: int, tp: int) -> GpuRank:
        p = self.parallel
        per_moe_dp = p.tp // p.moe_dp
        return GpuRank(
            slot=slot,
            pp=pp,
            tp=tp,
            attention_dp=tp // (p.attention_tp * p.cp),
            attention_tp=tp % p.attention_tp,
            moe_dp=tp // per_moe_dp,
            ep=tp % per_moe_dp // p.expert_tp,
            expert_tp=tp % p.expert_tp,
        )


@dataclass(frozen=True)
class Router:
    """One router a model. workers: ranks of the engines that register with it, by worker type."""

    model: str
    workers: Mapping[str, tuple[int, ...]]

    @property
    def disaggregated(self) -> bool:
        """Whether it sends a request to a prefill and a decode server."""
        return bool(self.workers.keys() & {"prefill", "decode"})


@dataclass(frozen=True)
class EngineMap:
    """All engines of a run, on the GPUs (slots) that trainers and engines share out.

    total_slots: GPUs of the run. trainer_slots: those with a training rank. first_slot: where the engines begin.
    kept_free: slots of placeholders. external: addresses of engines that run elsewhere already.
    """

    topology: Topology
    engines: tuple[Engine, ...]
    routers: tuple[Router, ...]
    total_slots: int
    trainer_slots: range
    first_slot: int
    gpus_per_node: int
    kept_free: tuple[range, ...] = ()
    external: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Machines of gpus_per_node GPUs that the slots fill."""
        return -(-self.total_slots // self.gpus_per_node)

    @property
    def colocated(self) -> bool:
        """Whether any engine shares GPUs with a trainer."""
        return any(engine.shares_trainer_gpus for engine in self.engines)

    def engines_on(self, slot: int) -> tuple[Engine, ...]:
        """The engines that use a GPU; one at most, as groups do not overlap."""
        return tuple(engine for engine in self.engines if slot in engine.slots)


def engine_map(a: Namespace) -> EngineMap:
    """Where the engines of a run go.

    Raises TopologyError and LayoutError for engines that cannot be placed, OSError if --sglang-config is unreadable.
    """
    servers = topology(a)
    trainers, first, total = gpu_slots(a)
    placed = servers.place(first, a.num_gpus_per_node, whole_nodes=a.accelerator == "cuda")
    engines = tuple(_engine(a, engine, *servers.groups[engine.group], trainers) for engine in placed)
    starts = [first + sum(group.num_gpus for _, group in servers.groups[:i]) for i in range(len(servers.groups))]
    kept_free = tuple(
        range(start, start + group.num_gpus)
        for start, (_, group) in zip(starts, servers.groups, strict=True)
        if group.worker_type == "placeholder"
    )
    return EngineMap(
        topology=servers,
        engines=engines,
        routers=tuple(_router(model, engines) for model in servers.models if model.groups),
        total_slots=total,
        trainer_slots=trainers,
        first_slot=first,
        gpus_per_node=a.num_gpus_per_node,
        kept_free=kept_free,
        external=tuple(a.rollout_external_engine_addrs or ()),
    )


def gpu_slots(a: Namespace) -> tuple[range, int, int]:
    """(slots of the trainers, first slot of the engines, slots in all), as the run reserves them.

    Trainers come first; engines follow them or, colocated, share their slots. A debug mode leaves one side out.
    """
    actor, rollout = a.actor_num_nodes * a.actor_num_gpus_per_node, a.rollout_num_gpus or 0
    if a.debug_train_only or a.load_debug_rollout_data:
        return range(actor), 0, actor
    if a.debug_rollout_only:
        return range(0), 0, rollout
    if a.rollout_external_engine_addrs:
        return range(actor), actor, actor
    if a.colocate:
        return range(actor), 0, max(actor, rollout)
    return range(actor), actor, actor + rollout


def engine_parallel(a: Namespace, group: ServerGroup) -> EngineParallel:
    """The sizes of a group's engines: its overrides, else the --sglang-* flags; tp takes what pp leaves.

    Raises LayoutError where the sizes do not tile the engine's GPUs.
    """

    def value(name: str) -> Any:
        return group.overrides.get(name, getattr(a, f"sglang_{name}"))

    sizes = {name: value(name) for name in ("pp_size", "dp_size", "attn_cp_size", "ep_size", "moe_dp_size")}
    gpus, pp = group.num_gpus_per_engine, sizes["pp_size"]
    tp = group.overrides.get("tp_size") or gpus // max(1, pp)
    if not value("enable_dp_attention"):
        sizes["dp_size"] = 1
    if value("moe_a2a_backend") in SPANNING_BACKENDS:
        sizes["ep_size"] = tp  # whatever was asked for
    for parts, whole, name in (
        (("pp_size",), gpus, "GPUs of an engine"),
        (("dp_size", "attn_cp_size"), tp, "tensor-parallel ranks of an engine"),
        (("moe_dp_size", "ep_size"), tp, "tensor-parallel ranks of an engine"),
    ):
        product = prod(sizes[part] for part in parts)
        if min(sizes[part] for part in parts) < 1 or whole % product:
            flags = tuple(f"--sglang-{part.replace('_', '-')}" for part in parts)
            says = " x ".join(f"{flag[9:]} {sizes[part]}" for flag, part in zip(flags, parts, strict=True))
            says += f" = {product}" if len(parts) > 1 else ""
            raise LayoutError(flags, f"{says} does not divide the {whole} {name}", f"{flags[0]} 1")
    return EngineParallel(
        tp=tp,
        pp=pp,
        dp=sizes["dp_size"],
        cp=sizes["attn_cp_size"],
        ep=sizes["ep_size"],
        moe_dp=sizes["moe_dp_size"],
    )


def _engine(a: Namespace, placed: PlacedEngine, model: ServerModel, group: ServerGroup, trainers: range) -> Engine:
    per_node = a.num_gpus_per_node
    nodes = tuple(
        EngineNode(
            node_rank=i,
            node=slots.start // per_node,
            gpus=range(slots.start % per_node, slots.start % per_node + len(slots)),
            slots=slots,
        )
        for i, slots in enumerate(placed.nodes)
    )
    return Engine(
        rank=placed.rank,
        model=model.name,
        group=placed.group,
        worker_type=group.worker_type,
        nodes=nodes,
        parallel=engine_parallel(a, group),
        update_weights=model.update_weights,
        shares_trainer_gpus=any(slot in trainers for slot in placed.slots),
    )


def _router(model: ServerModel, engines: tuple[Engine, ...]) -> Router:
    workers: dict[str, tuple[int, ...]] = {}
    for engine in engines:
        if engine.model == model.name and engine.worker_type != "encoder":
            workers[engine.worker_type] = (*workers.get(engine.worker_type, ()), engine.rank)
    return Router(model.name, workers)
