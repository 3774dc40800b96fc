"""The plan of a run: every part that can be computed from its arguments, and the verdict whether it will start."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from slime.plan.batch import BatchError, BatchPlan, plan_batch
from slime.plan.engines import EngineMap, engine_map
from slime.plan.fit import (
    GIB,
    GroupMemory,
    Phase,
    generation_memory,
    phases,
    unseen_quantization,
    visible_memory,
)
from slime.plan.memory import HostMemory, RankMemory, host_memory, tokens_per_rank, trainer_memory
from slime.plan.parameters import Sizes
from slime.plan.ranks import RankGrid, rank_grid
from slime.plan.sections import (
    CheckpointPlan,
    Cluster,
    ContextParallel,
    ModelFacts,
    Stage,
    context_parallel,
    model_facts,
    plan_checkpoint,
    plan_cluster,
    plan_stages,
)
from slime.plan.weight_sync import WeightSync, plan_weight_sync
from slime.utils.arguments.flag import Problem
from slime.utils.layout import LayoutError, index_sharing, pipeline_layout
from slime.utils.model_shape import ModelShape, ShapeError
from slime.utils.sglang_config import TopologyError

if TYPE_CHECKING:
    from slime.utils.arguments.reading import Reading

Verdict = Literal["starts", "does not fit", "illegal", "not supported yet"]
T = TypeVar("T")


@dataclass(frozen=True)
class Assumptions:
    """What the plan takes the machines to be. gpu_memory_gb: what one GPU is sold with; gpu_bytes: what torch sees of
    it; network_gb_per_s: 10^9 bytes a second of one GPU."""

    gpu_memory_gb: float
    gpu_bytes: int
    network_gb_per_s: float


@dataclass(frozen=True)
class Plan:
    """Everything about a run that its arguments decide. A part that cannot be computed is None (or empty), and
    `not_computed` says why, by the part's name.

    verdict: "illegal" if a rule is broken; else "does not fit" if a phase needs more memory than a GPU has; else "not
    supported yet" if this version lacks a feature that is asked for, or the plan cannot count the model; else
    "starts". reasons: sentences behind it.
    problems, unsupported, absent: what breaks a rule, what is legal but not there yet, and files that are missing on
    this machine, which need not be the one that runs.
    tokens: of the largest micro-batch on one GPU. training_gpus, engine_gpus: memory of each pipeline stage's ranks
    and of each group of engines.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    problems: tuple[Problem, ...]
    unsupported: tuple[Problem, ...]
    absent: tuple[Problem, ...]
    notices: tuple[str, ...]
    differences: tuple[str, ...]
    assumptions: Assumptions
    cluster: Cluster
    model: ModelFacts | None
    grid: RankGrid | None
    context_parallel: ContextParallel | None
    stages: tuple[Stage, ...]
    tokens: int | None
    training: tuple[RankMemory, ...]
    engines: EngineMap | None
    generation: tuple[GroupMemory, ...]
    phases: tuple[Phase, ...]
    host: HostMemory | None
    weight_sync: WeightSync | None
    batch: BatchPlan | None
    checkpoint: CheckpointPlan | None
    not_computed: Mapping[str, str]

    @property
    def exit_code(self) -> int:
        """0 if the run starts, else 2."""
        return 0 if self.verdict == "starts" else 2


class _Parts:
    """Computes the parts of a plan; what cannot be computed is None and has its reason in `missing`.

    problems: rules that came up on the way. uncountable: the model has parts that the plan cannot count.
    """

    def __init__(self, broken: bool):
        self.missing: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.uncountable = False
        # Values that break a rule (a size of 0, a missing number) may stop the arithmetic anywhere.
        self._expected = (ValueError, OSError, *((TypeError, ArithmeticError, LookupError) if broken else ()))

    def __call__(self, name: str, compute: Callable[[], T], *needs: object) -> T | None:
        """compute(), unless one of the parts it needs is None."""
        if any(need is None for need in needs):
            self.missing[name] = "needs a part that cannot be computed"
            return None
        try:
            return compute()
        except self._expected as error:
            self.missing[name] = str(error) or type(error).__name__
            self.uncountable |= isinstance(error, ShapeError)
            for found in error.problems if isinstance(error, TopologyError) else (error,):
                if isinstance(found, LayoutError):
                    self.problems.append(Problem(found.flags, found.says, found.try_))
            if isinstance(error, BatchError):
                self.problems.append(Problem(("--global-batch-size",), str(error)))
            return None


def make_plan(reading: "Reading", *, gpu_memory_gb: float, network_gb_per_s: float) -> Plan:
    """Plan the run of a command line that was read, also if it breaks rules: then as far as its values allow.

    gpu_memory_gb: memory that a GPU is sold with. network_gb_per_s: what one GPU sends and receives over the network.
    """
    a = reading.args
    by_kind = {
        kind: tuple(p for p in reading.problems if p.kind == kind) for kind in ("rule", "unsupported", "absent")
    }
    part = _Parts(bool(by_kind["rule"]))
    shape = part("model", lambda: ModelShape.from_args(a))
    trainer = _trainer_parts(a, part, shape)
    engines = part("engines", lambda: engine_map(a))
    available = visible_memory(gpu_memory_gb)
    generation, others = part(
        "engine memory", lambda: generation_memory(a, engines, shape, available), engines, shape
    ) or ((), ())
    if others:
        part.missing["memory of other models' engines"] = f"{', '.join(others)}: their size is not known here"
    fit = tuple(phases(a, trainer["training"], generation, available))
    weights = max((group.memory.weights for group in generation), default=0)
    # A rule that the checks know is told in their words.
    told = {flag for problem in by_kind["rule"] for flag in problem.flags}
    by_kind["rule"] += tuple(p for p in dict.fromkeys(part.problems) if not told & set(p.flags))
    values = {
        **trainer,
        "assumptions": Assumptions(gpu_memory_gb, available, network_gb_per_s),
        "notices": (*reading.notices, *filter(None, [unseen_quantization(a)[1]])),
        "differences": tuple(reading.differences),
        "cluster": plan_cluster(a),
        "engines": engines,
        "generation": generation,
        "phases": fit,
        "host": part("host memory", lambda: host_memory(a, list(trainer["training"]), weights)),
        "weight_sync": _weight_sync(a, part, shape, trainer, engines, network_gb_per_s),
    }
    del values["layout"]
    return Plan(
        **_verdict(by_kind, fit, part),
        **values,
        problems=by_kind["rule"],
        unsupported=by_kind["unsupported"],
        absent=by_kind["absent"],
        not_computed=part.missing,
    )


def _trainer_parts(a: Namespace, part: _Parts, shape: ModelShape | None) -> dict[str, Any]:
    """The parts that are about training; empty where nothing is trained."""
    if a.debug_rollout_only:
        nothing = dict.fromkeys(("layout", "grid", "context_parallel", "tokens", "batch", "checkpoint"))
        model = part("model facts", lambda: model_facts(a, shape, 0), shape)
        return {**nothing, "model": model, "stages": (), "training": ()}
    layout = part("pipeline", lambda: pipeline_layout(a))
    grid = part("rank grid", lambda: rank_grid(a))
    sharing = part("index sharing", lambda: index_sharing(a))
    mtp = shape.mtp_layers if layout is not None and shape is not None else 0
    model = part("model facts", lambda: model_facts(a, shape, mtp), shape)
    built = None if model is None else model.with_mtp if mtp else model.parameters
    held = (shape, layout, grid)
    return {
        "layout": layout,
        "grid": grid,
        "model": model,
        "context_parallel": part("context parallelism", lambda: context_parallel(a)),
        "tokens": part("tokens", lambda: tokens_per_rank(a)),
        "stages": part("stages", lambda: plan_stages(a, shape, layout, Sizes.from_args(a), sharing), *held) or (),
        "training": tuple(part("memory", lambda: trainer_memory(a, shape=shape, layout=layout), *held) or ()),
        "batch": part("batch", lambda: plan_batch(a, dp_size=grid.dp, vp_size=layout.vp_size), grid, layout),
        "checkpoint": part("checkpoint", lambda: plan_checkpoint(a, built), built),
    }


def _verdict(by_kind: Mapping[str, tuple[Problem, ...]], fit: tuple[Phase, ...], part: _Parts) -> dict[str, Any]:
    tight = [phase for phase in fit if not phase.fits and phase.certain]
    reasons = []
    if by_kind["rule"]:
        reasons.append(f"{_count(by_kind['rule'], 'rule')} broken")
    for phase in fit:
        if not phase.fits:
            needs = f"needs {phase.bytes / GIB:.1f} GiB, a GPU has {phase.available / GIB:.1f} GiB"
            guess = "" if phase.certain else "; not counted against the run: the engines' precision is a guess"
            reasons.append(f"{phase.name}, {phase.where}: {needs}{guess}")
    if by_kind["unsupported"]:
        reasons.append(f"{_count(by_kind['unsupported'], 'feature')} asked for that this version does not have yet")
    if by_kind["absent"]:
        reasons.append(f"{_count(by_kind['absent'], 'path')} not there on this machine, and not checked")
    reasons += [f"{name} not computed: {why}" for name, why in part.missing.items()]
    if by_kind["rule"]:
        verdict: Verdict = "illegal"
    elif tight:
        verdict = "does not fit"
    else:
        verdict = "not supported yet" if by_kind["unsupported"] or part.uncountable else "starts"
    return {"verdict": verdict, "reasons": tuple(reasons)}


def _count(problems: tuple[Problem, ...], noun: str) -> str:
    return f"{len(problems)} {noun} is" if len(problems) == 1 else f"{len(problems)} {noun}s are"


def _weight_sync(
    a: Namespace,
    part: _Parts,
    shape: ModelShape | None,
    trainer: Mapping[str, Any],
    engines: EngineMap | None,
    network_gb_per_s: float,
) -> WeightSync | None:
    layout, grid = trainer["layout"], trainer["grid"]
    if layout is None or grid is None or engines is None or not engines.engines:
        return None  # nothing is trained, or nothing of ours generates
    return part(
        "weight sync",
        lambda: plan_weight_sync(
            a,
            shape,
            layout,
            senders=grid.group_of("pp", 0),  # the first rank of every stage
            engine_gpus=[engine.num_gpus for engine in engines.engines if engine.update_weights],
            network_gb_per_s=network_gb_per_s,
        ),
        shape,
    )
