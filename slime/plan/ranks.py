"""Who is grouped with whom among the training ranks: every process group, computed without processes."""

import itertools
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from slime.utils.layout import LayoutError

# Axes that vary inside a group of each kind. Attention and dense layers use the first grid, experts the second; both
# agree on the pipeline.
DENSE_KINDS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("cp", "dp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "mp": ("tp", "pp"),
}
EXPERT_KINDS = {
    "etp": ("etp",),
    "ep": ("ep",),
    "edp": ("edp",),
    "etp_ep": ("etp", "ep"),
    "etp_ep_pp": ("etp", "ep", "pp"),
}
EDGE_KINDS = ("embedding", "position_embedding")
OPTIMIZER_KINDS = ("optimizer_dp_cp", "optimizer_edp", "optimizer_edp_replicas")
KINDS = (*DENSE_KINDS, *EXPERT_KINDS, *EDGE_KINDS, *OPTIMIZER_KINDS)

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on every axis."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class RankGrid:
    """Sizes of all axes, and the groups that megatron-core 0.19.2 makes of them.

    tp x cp x dp x pp = etp x ep x edp x pp = world_size. dp is data parallelism without CP, edp that of the experts.
    pipeline_last: the pipeline is the slowest axis (as without --use-tp-pp-dp-mapping), else data parallelism is.
    optimizer_instances: --num-distributed-optimizer-instances; each shards the optimizer's state on its own.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    pipeline_last: bool = True
    optimizer_instances: int = 1

    def __post_init__(self) -> None:
        if self.tp * self.cp * self.dp != self.etp * self.ep * self.edp:
            raise ValueError(f"attention and experts do not tile the same ranks: {self}")

    @property
    def world_size(self) -> int:
        """Training ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every axis by name."""
        return {name: getattr(self, name) for name in ("tp", "cp", "dp", "pp", "etp", "ep", "edp")}

    @property
    def optimizer_shards(self) -> int:
        """Ranks over which the optimizer's state of a dense parameter is spread."""
        return self.dp * self.cp // self.optimizer_instances

    @property
    def expert_optimizer_shards(self) -> int:
        """Ranks over which the optimizer's state of an expert's parameter is spread."""
        return self.edp // self.optimizer_instances

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands on every axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size}")
        dense, expert = _digits(rank, self._axes(True)), _digits(rank, self._axes(False))
        return Coordinates(rank=rank, **{**expert, **dense})

    def groups(self, kind: str) -> Groups:
        """All groups of a kind (one of KINDS), in Megatron's order; each lists its ranks in the group's order."""
        if kind in DENSE_KINDS or kind in EXPERT_KINDS:
            varying = DENSE_KINDS.get(kind) or EXPERT_KINDS[kind]
            return _groups(self._axes(kind in DENSE_KINDS), varying)
        if kind == "embedding":
            return tuple(tuple(dict.fromkeys((ranks[0], ranks[-1]))) for ranks in self.groups("pp"))
        if kind == "position_embedding":
            return tuple(ranks[:1] for ranks in self.groups("pp"))
        if kind == "optimizer_edp_replicas":
            step = self.expert_optimizer_shards
            return tuple(ranks[i::step] for ranks in self.groups("edp") for i in range(step))
        if kind in OPTIMIZER_KINDS:
            of, step = ("dp_cp", self.optimizer_shards), ("edp", self.expert_optimizer_shards)
            source, size = of if kind == "optimizer_dp_cp" else step
            return tuple(
                ranks[start : start + size] for ranks in self.groups(source) for start in range(0, len(ranks), size)
            )
        raise ValueError(f"no kind of group is called {kind}; there are {', '.join(KINDS)}")

    def group_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group; empty for an embedding group it is not part of."""
        return next((ranks for ranks in self.groups(kind) if rank in ranks), ())

    def local_experts(self, num_experts: int, ep_rank: int) -> range:
        """Global ids of the experts on an expert-parallel rank: consecutive, local id 0 first."""
        each = num_experts // self.ep
        return range(ep_rank * each, (ep_rank + 1) * each)

    def nodes(self, kind: str, gpus_per_node: int) -> int:
        """The most nodes that a group of this kind spans, ranks filling nodes in order."""
        return max(len({rank // gpus_per_node for rank in ranks}) for ranks in self.groups(kind))

    def _axes(self, dense: bool) -> tuple[tuple[str, int], ...]:
        """(name, size) of the axes of one grid, fastest first."""
        inner = (("tp", self.tp), ("cp", self.cp)) if dense else (("etp", self.etp), ("ep", self.ep))
        data = ("dp", self.dp) if dense else ("edp", self.edp)
        pipeline = ("pp", self.pp)
        return (*inner, data, pipeline) if self.pipeline_last else (*inner, pipeline, data)


def rank_grid(a: Namespace) -> RankGrid:
    """The grid of the trainers. Raises LayoutError if the sizes do not tile a.world_size or contradict each other."""
    tp, cp, pp = a.tensor_model_parallel_size, a.context_parallel_size, a.pipeline_model_parallel_size
    # Without experts Megatron still makes their groups, at the default sizes.
    etp, ep = a.expert_tensor_parallel_size or tp, a.expert_model_parallel_size
    pipeline = {"--pipeline-model-parallel-size": pp}
    dp = _quotient(a.world_size, {"--tensor-model-parallel-size": tp, "--context-parallel-size": cp, **pipeline})
    edp = _quotient(
        a.world_size, {"--expert-tensor-parallel-size": etp, "--expert-model-parallel-size": ep, **pipeline}
    )
    last, instances = not a.use_tp_pp_dp_mapping, a.num_distributed_optimizer_instances
    if not last and pp > 1 and dp != edp:
        says = (
            f"needs as much data parallelism for the experts as for the rest, which are {edp} and {dp} "
            f"(expert tensor {etp} x expert {ep}, tensor {tp} x context {cp})"
        )
        raise LayoutError(("--use-tp-pp-dp-mapping",), says, "leave out --use-tp-pp-dp-mapping")
    for what, size in (("data x context parallel", dp * cp), ("expert data parallel", edp)):
        if instances < 1 or size % instances:
            says = f"{instances} does not divide the {size} {what} ranks"
            raise LayoutError(
                ("--num-distributed-optimizer-instances",), says, "--num-distributed-optimizer-instances 1"
            )
    return RankGrid(tp, cp, dp, pp, etp, ep, edp, last, instances)


def _quotient(world: int, sizes: dict[str, int]) -> int:
    tile = prod(sizes.values())
    if min(sizes.values()) < 1 or world < 1 or world % tile:
        product = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        raise LayoutError(tuple(sizes), f"{product} = {tile} does not divide the {world} training GPUs")
    return world // tile


def _digits(rank: int, axes: Sequence[tuple[str, int]]) -> dict[str, int]:
    digits = {}
    for name, size in axes:
        rank, digits[name] = divmod(rank, size)
    return digits


def _groups(axes: Sequence[tuple[str, int]], varying: Sequence[str]) -> Groups:
    """Ranks that differ in the varying axes only; groups and members count the fastest axis first."""
    strides = {name: prod(size for _, size in axes[:index]) for index, (name, size) in enumerate(axes)}

    def offsets(names: Sequence[str]) -> list[int]:
        # product() counts its last argument fastest
        slowest_first = [[strides[name] * i for i in range(size)] for name, size in reversed(axes) if name in names]
        return [sum(parts) for parts in itertools.product(*slowest_first)]

    members = offsets(varying)
    bases = offsets([name for name, _ in axes if name not in varying])
    return tuple(tuple(base + member for member in members) for base in bases)
