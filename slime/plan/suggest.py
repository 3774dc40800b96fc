"""Searches parallel layouts of the trainer that are legal and fit a number of GPUs, best first."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.plan.engines import engine_map
from slime.plan.fit import generation_memory, visible_memory
from slime.plan.memory import RankMemory, longest_sample, trainer_memory
from slime.utils.arguments.flag import Problem
from slime.utils.arguments.namespace import Args
from slime.utils.arguments.reading import Reading, read_args
from slime.utils.layout import index_sharing, legal_splits
from slime.utils.model_shape import GroupedQuery, ModelShape

# Options that a suggestion decides, with the number of values each takes; they are removed from the command line.
DECIDED = {
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1,
    "--expert-model-parallel-size": 1,
    "--expert-tensor-parallel-size": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--pipeline-model-parallel-layout": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--sequence-parallel": 0,
    "--actor-num-nodes": 1,
    "--actor-num-gpus-per-node": 1,
}
MAX_CONTEXT_PARALLEL = 16
CHECKED = 60  # layouts that the real checks look at, best first, before the search gives up


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout. first, last: layers of the outer pipeline stages, None for an even pipeline."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    first: int | None
    last: int | None

    def flags(self, moe: bool) -> list[str]:
        """The options that ask for it."""
        tokens = [
            *("--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)),
            *("--context-parallel-size", str(self.cp)),
        ]
        if moe:
            tokens += ["--expert-model-parallel-size", str(self.ep), "--expert-tensor-parallel-size", str(self.etp)]
        if self.tp > 1:
            tokens.append("--sequence-parallel")
        if self.first is not None:
            tokens += ["--decoder-first-pipeline-num-layers", str(self.first)]
        if self.last is not None and self.pp > 2:
            tokens += ["--decoder-last-pipeline-num-layers", str(self.last)]
        return tokens


@dataclass(frozen=True)
class Suggestion:
    """A layout with what it costs. peaks: bytes of a GPU of each pipeline stage in training; update_peak: the most in
    a weight update, with the weights of an engine on the same GPU; tokens: of a GPU's micro-batch.

    bubble: share of the pipeline's time that a stage idles, (pp - 1) / (pp - 1 + micro-batches of a step).
    """

    layout: Layout
    flags: tuple[str, ...]
    peaks: tuple[int, ...]
    update_peak: int
    tokens: int
    bubble: float
    fits: bool

    @property
    def peak(self) -> int:
        """The most at any time."""
        return max(*self.peaks, self.update_peak)


@dataclass(frozen=True)
class Search:
    """The best layouts, how many were looked at, and problems of the command line that no layout solves."""

    suggestions: tuple[Suggestion, ...]
    considered: int
    fitting: int
    remaining: tuple[Problem, ...]


def suggest(
    argv: Sequence[str],
    *,
    gpus: int,
    gpus_per_node: int = 8,
    gpu_memory_gb: float,
    count: int = 10,
    environ: Mapping[str, str],
    cache: Path | None = None,
) -> Search:
    """Layouts for `gpus` training GPUs of the model and batch that `argv` describes, recomputation as it says.

    Order: those that fit; then fewer GPUs that share the work of one layer on one sample (TP x CP), which exchange
    activations in every layer; then fewer GPUs that tokens travel to for their experts (EP); then more data
    parallelism; then less pipeline bubble; then more free memory. Every suggestion passed the checks of a real launch.

    Raises ValueError when the model's size is unknown.
    """
    rest = without(argv, DECIDED)
    nodes, per_node = max(1, gpus // gpus_per_node), min(gpus, gpus_per_node)
    if nodes * per_node != gpus:
        raise ValueError(f"--gpus {gpus} does not fill nodes of {gpus_per_node} (--gpus-per-node)")
    rest += ["--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(per_node)]
    base = read_args(rest, environ=environ, cache=cache, dry_run=True).args
    shape = ModelShape.from_args(base)
    available = visible_memory(gpu_memory_gb)
    beside = _engine_weights(base, shape, available)
    found = [_measure(base, shape, layout, available, beside) for layout in layouts(base, shape, gpus, gpus_per_node)]
    found.sort(key=_order)
    readings = []
    for suggestion in found[:CHECKED]:
        reading = read_args([*rest, *suggestion.flags], environ=environ, cache=cache, dry_run=True)
        readings.append((suggestion, _broken(reading)))
    remaining = set.intersection(*(problems for _, problems in readings)) if len(readings) > 1 else set()
    legal = [suggestion for suggestion, problems in readings if problems <= remaining]
    return Search(
        suggestions=tuple(legal[:count]),
        considered=len(found),
        fitting=sum(suggestion.fits for suggestion in found),
        remaining=tuple(sorted(remaining, key=str)),
    )


def layouts(a: Namespace, shape: ModelShape, gpus: int, gpus_per_node: int) -> Iterator[Layout]:
    """Layouts whose sizes divide what they must: heads, experts, layers, GPUs and samples."""
    moe = bool(a.num_experts)
    sharing = index_sharing(a)
    for tp in _divisors(min(gpus, gpus_per_node)):
        if not _heads_divide(shape, tp):
            continue
        for pp in _divisors(gpus // tp):
            splits = _splits(shape.num_layers, pp, sharing)
            for cp in _divisors(gpus // tp // pp) if splits else ():
                dp = gpus // (tp * pp * cp)
                if cp > MAX_CONTEXT_PARALLEL or (a.global_batch_size and a.global_batch_size % dp):
                    continue
                for ep, etp in _expert_sizes(a, gpus // pp, tp) if moe else ((1, 1),):
                    yield Layout(tp, pp, cp, dp, ep, etp, *splits[0])


def without(argv: Sequence[str], options: Mapping[str, int]) -> list[str]:
    """The tokens without these options and their values (`--option value` or `--option=value`)."""
    kept, skip = [], 0
    for token in argv:
        if skip:
            skip -= 1
            continue
        name, equals, _ = token.partition("=")
        if name in options:
            skip = 0 if equals else options[name]
            continue
        kept.append(token)
    return kept


def _splits(layers: int, pp: int, sharing: object) -> list[tuple[int | None, int | None]]:
    """The most even pipeline: without flags where all stages can be equal, else (first, last)."""
    if pp == 1:
        return [(None, None)]
    if pp > layers:
        return []
    splits = legal_splits(sharing, layers, pp)
    if not splits:
        return []
    even = layers % pp == 0 and splits[0] == (layers // pp, layers // pp)
    return [(None, None) if even else splits[0]]


def _heads_divide(shape: ModelShape, tp: int) -> bool:
    for attention in {layer.attention for layer in shape.layers}:
        heads = getattr(attention, "heads", None) or attention.value_heads
        if heads % tp or (isinstance(attention, GroupedQuery) and attention.groups % tp):
            return False
    return True


def _expert_sizes(a: Namespace, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    """(EP, expert TP) that tile the ranks of a pipeline stage; experts are split over TP only if they were before."""
    for etp in sorted({1, min(tp, a.expert_tensor_parallel_size or 1)}):
        for ep in _divisors(a.num_experts):
            if ranks % (ep * etp) == 0:
                yield ep, etp


def _engine_weights(a: Args, shape: ModelShape, available: int) -> int:
    """Bytes of weights that an engine holds on a training GPU during a weight update; 0 where none does."""
    try:
        groups, _ = generation_memory(a, engine_map(a), shape, available)
    except (ValueError, OSError):  # engines that cannot be placed are a problem that the checks report
        return 0
    return max((group.memory.weights for group in groups if group.shared), default=0)


def _measure(base: Args, shape: ModelShape, layout: Layout, available: int, beside: int) -> Suggestion:
    changed = base.replace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        decoder_first_pipeline_num_layers=layout.first,
        decoder_last_pipeline_num_layers=layout.last,
        sequence_parallel=layout.tp > 1,
        data_parallel_size=layout.dp,
    )
    passes = _micro_batches(base, layout)
    ranks: list[RankMemory] = trainer_memory(changed, shape=shape)
    peaks = tuple(rank.training for rank in ranks)
    return Suggestion(
        layout=layout,
        flags=tuple(layout.flags(bool(base.num_experts))),
        peaks=peaks,
        tokens=max(base.max_tokens_per_gpu or 0, -(-longest_sample(base) // layout.cp)),
        bubble=(layout.pp - 1) / (layout.pp - 1 + passes),
        update_peak=max(rank.update_peak(beside) for rank in ranks),
        fits=all(max(rank.peak, rank.update_peak(beside)) <= available for rank in ranks),
    )


def _micro_batches(a: Namespace, layout: Layout) -> int:
    """Of one rank and step, if samples are half as long as they can be."""
    samples = max(1, (a.global_batch_size or 1) // layout.dp)
    if not a.use_dynamic_batch_size:
        return max(1, samples // a.micro_batch_size)
    typical = max(1, longest_sample(a) // 2)
    fitting = max(1, a.max_tokens_per_gpu * layout.cp // typical)
    return -(-samples // fitting)


def _order(s: Suggestion) -> tuple:
    x = s.layout
    return not s.fits, s.peak if not s.fits else 0, x.tp * x.cp, x.ep * x.etp, -x.dp, s.bubble, s.peak


def _broken(reading: Reading) -> set[Problem]:
    return {problem for problem in reading.problems if problem.kind == "rule"}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
