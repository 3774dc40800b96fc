"""The plan for people: a page of tables that reads well at 100 columns, with and without a terminal."""

from collections.abc import Iterable, Sequence
from typing import IO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slime.plan.fit import Phase, stage_parts
from slime.plan.plan import Plan
from slime.plan.ranks import RankGrid
from slime.plan.suggest import Search
from slime.utils.arguments.flag import Problem

WIDTH = 100
GB = 10**9
GIB = 2**30
STYLES = {
    "starts": "bold green",
    "does not fit": "bold red",
    "illegal": "bold red",
    "not supported yet": "bold yellow",
}
GROUPS = ("tp", "cp", "dp", "pp", "dp_cp", "ep", "etp", "edp")


def print_plan(plan: Plan, stream: IO[str], rank: int = 0) -> None:
    """Write the page. rank: the training rank whose groups are listed. Colours only on a terminal."""
    console = _console(stream)
    for index, section in enumerate(page(plan, rank)):
        if index:
            console.print()
        console.print(section)


def _console(stream: IO[str]) -> Console:
    console = Console(file=stream, highlight=False)
    if console.is_terminal and console.width >= WIDTH:
        return console
    return Console(file=stream, highlight=False, width=WIDTH, no_color=not console.is_terminal)


def _console(stream: IO[str]) -> Console:
    console = Console(file=stream, highlight=False)
    if console.is_terminal and console.width >= WIDTH:
        return console
    return Console(file=stream, highlight=False, width=WIDTH, no_color=not console.is_terminal)


def print_search(search: Search, gpus: int, gpu_memory_gb: float, stream: IO[str]) -> None:
    """Write the layouts that a search found."""
    console = _console(stream)
    head = f"{search.considered} layouts on {gpus} GPUs of {gpu_memory_gb:g} GB were considered, {search.fitting} fit"
    console.print(Text(head, "bold"))
    if remaining := _problems("broken with every layout that was checked", search.remaining):
        console.print(remaining)
    if not search.suggestions:
        console.print("none of the best is legal")
        return
    table = _table("best first; GiB of the fullest GPU in training and in a weight update")
    for column in ("TP", "PP", "CP", "EP", "DP", "first/last", "tokens a GPU", "bubble", "training", "update", "fits"):
        table.add_column(column, justify="left" if column in ("first/last", "fits") else "right")
    for s in search.suggestions:
        x = s.layout
        split = "even" if x.first is None else f"{x.first}/{x.last}"
        sizes = [str(n) for n in (x.tp, x.pp, x.cp, x.ep, x.dp)]
        numbers = [f"{s.tokens:,}", f"{s.bubble:.0%}", f"{max(s.peaks) / GIB:.1f}", f"{s.update_peak / GIB:.1f}"]
        table.add_row(*sizes, split, *numbers, _yes_no(s.fits))
    console.print(table)
    console.print(Text("the first one's flags:", "bold"))
    console.print(Padding(Text(" ".join(search.suggestions[0].flags)), (0, 0, 0, 2)))


def page(plan: Plan, rank: int = 0) -> list[RenderableType]:
    """The sections in order; those with nothing to say are left out."""
    sections = [
        _verdict(plan),
        _problems("breaks a rule", plan.problems),
        _problems("not supported yet", plan.unsupported),
        _problems("not on this machine, not checked", plan.absent),
        _lines("worth a look", plan.notices),
        _lines("the checkpoint's config.json and the command line differ", plan.differences),
        _model(plan),
        _cluster(plan),
        _grid(plan, rank),
        _stages(plan),
        _training(plan),
        _engines(plan),
        _generation(plan),
        _phases(plan),
        _host(plan),
        _batch(plan),
        _weight_sync(plan),
        _checkpoint(plan),
    ]
    return [section for section in sections if section is not None]


def gigabytes(size: float) -> str:
    """A number of bytes in GB (10^9), at least three digits of it."""
    value = size / GB
    if value >= 100:
        return f"{value:,.0f} GB"
    return f"{value:.1f} GB" if value >= 0.1 or not size else f"{size / 10**6:.1f} MB"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: runs as 3-9, equal steps as 0, 8, ... 56."""
    numbers = list(numbers)
    if len(numbers) < 2:
        return ", ".join(map(str, numbers))
    step = numbers[1] - numbers[0]
    if len(numbers) > 2 and all(b - a == step for a, b in zip(numbers, numbers[1:], strict=False)):
        if step == 1:
            return f"{numbers[0]}-{numbers[-1]}"
        if len(numbers) > 4:
            return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _verdict(plan: Plan) -> RenderableType:
    c = plan.cluster
    shared = "shared by trainer and engines" if c.colocated else f"{c.trainer_gpus} train, {c.rollout_gpus} generate"
    head = Text.assemble(
        ("verdict: ", "bold"),
        (plan.verdict, STYLES[plan.verdict]),
        f"   {_many(c.total_gpus, 'GPU')} on {_many(c.nodes, 'node')}, {shared}; ",
        f"{plan.assumptions.gpu_memory_gb:g} GB a GPU",
    )
    return Group(head, *(Padding(Text(reason), (0, 0, 0, 2)) for reason in plan.reasons))


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _problems(title: str, problems: Sequence[Problem]) -> RenderableType | None:
    if not problems:
        return None
    table = _table(title, header=False)
    table.add_column(overflow="fold", ratio=1)
    table.add_column(overflow="fold", ratio=2)
    for problem in problems:
        says = problem.says + (f"\ntry: {problem.try_}" if problem.try_ else "")
        table.add_row(Text("\n".join(problem.flags)), Text(says))
    return table


def _lines(title: str, lines: Sequence[str]) -> RenderableType | None:
    if not lines:
        return None
    table = _table(title, header=False)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(Text(line))
    return table


def _model(plan: Plan) -> RenderableType | None:
    m = plan.model
    if m is None:
        return None
    kind = f"{m.layers} layers of width {m.hidden}, vocabulary {m.vocab:,}"
    if m.experts:
        kind += f"; {m.moe_layers} layers with {m.experts} experts, {m.experts_per_token} a token"
    rows = [
        ("model", (f"{m.model_type}: " if m.model_type else "") + kind),
        ("parameters", f"{m.parameters:,}" + (f", {m.active:,} active a token" if m.experts else "")),
    ]
    if m.mtp_layers:
        rows.append(("with MTP", f"{m.with_mtp:,} ({m.mtp_layers} MTP layer{'s' if m.mtp_layers > 1 else ''})"))
    if m.padded_vocab != m.vocab:
        rows.append(("vocabulary", f"padded to {m.padded_vocab:,} rows for tensor parallelism"))
    if m.uncounted:
        rows.append(("not counted", ", ".join(m.uncounted)))
    return _pairs("model", rows)


def _cluster(plan: Plan) -> RenderableType | None:
    cp = plan.context_parallel
    if plan.grid is None or cp is None:
        return None
    g = plan.grid
    dense = f"tensor {g.tp} x context {g.cp} x data {g.dp} x pipeline {g.pp} = {_many(g.world_size, 'rank')}"
    rows = [("attention, dense", dense)]
    if plan.model is not None and plan.model.experts:
        each = plan.model.experts // g.ep
        held = f"; each expert-parallel rank holds {each} consecutive experts of a layer" if g.ep > 1 else ""
        rows.append(("experts", f"tensor {g.etp} x expert {g.ep} x data {g.edp} x pipeline {g.pp}{held}"))
    if cp.size > 1:
        rows.append(("sequences", f"{cp.layout}, {cp.exchange}: {cp.explains}"))
    return _pairs("parallel layout", rows)


def _grid(plan: Plan, rank: int) -> RenderableType | None:
    if plan.grid is None or plan.grid.world_size == 1:
        return None
    grid: RankGrid = plan.grid
    table = _table(f"process groups of rank {rank}")
    for column in ("kind", "groups", "of", "nodes", f"ranks with {rank}"):
        table.add_column(column, justify="right" if column in ("groups", "of", "nodes") else "left")
    for kind in GROUPS:
        groups = grid.groups(kind)
        if len(groups[0]) > 1:
            mine = grid.group_of(kind, rank)
            nodes = grid.nodes(kind, plan.cluster.gpus_per_node)
            table.add_row(kind, str(len(groups)), str(len(groups[0])), str(nodes), spans(mine))
    return table


def _stages(plan: Plan) -> RenderableType | None:
    if not plan.stages:
        return None
    shared = any(stage.computing is not None for stage in plan.stages)
    experts = any(stage.experts for stage in plan.stages)
    table = _table("pipeline stages: layers counted from 0, numbers of one GPU")
    table.add_column("stage", justify="right")
    table.add_column("layers")
    if shared:
        table.add_column("own indexer")
    if experts:
        table.add_column("experts", justify="right")
    table.add_column("besides")
    table.add_column("parameters", justify="right")
    for stage in plan.stages:
        count = sum(map(len, stage.layers))
        extras = [
            *(("embedding",) if stage.embedding else ()),
            *((f"MTP x {stage.mtp_layers}",) if stage.mtp_layers else ()),
            *(("head, loss",) if stage.head else ()),
        ]
        cells = [str(stage.pp_rank), f"{' | '.join(spans(layers) for layers in stage.layers)} ({count})"]
        cells += [spans(stage.computing or ())] if shared else []
        cells += [str(stage.experts) if stage.experts else "-"] if experts else []
        table.add_row(*cells, " + ".join(extras), f"{stage.parameters:,}")
    return table


def _training(plan: Plan) -> RenderableType | None:
    if not plan.training:
        return None
    table = _table(f"memory of a GPU in training, GiB; micro-batches of {plan.tokens:,} tokens a GPU")
    table.add_column("stage", justify="right")
    for name, _ in stage_parts(plan.training[0]):
        table.add_column(_words(name), justify="right")
    table.add_column("in flight", justify="right")
    table.add_column("peak", justify="right")
    if plan.phases:
        table.add_column("fits")
    available = plan.assumptions.gpu_bytes
    for rank in plan.training:
        sizes = [size for _, size in stage_parts(rank)]
        flight = f"{rank.activations.in_flight:.3g}"
        row = [f"{size / GIB:.1f}" for size in sizes] + [flight, f"{sum(sizes) / GIB:.1f}"]
        table.add_row(str(rank.pp_rank), *row, *([_yes_no(sum(sizes) <= available)] if plan.phases else ()))
    return table


def _phases(plan: Plan) -> RenderableType | None:
    if not plan.phases:
        return None
    table = _table("memory of the fullest GPU in each phase, GiB")
    for column in ("phase", "where", "made of"):
        table.add_column(column, overflow="fold")
    table.add_column("needs", justify="right")
    table.add_column("has", justify="right")
    table.add_column("fits")
    for phase in plan.phases:
        numbers = f"{phase.bytes / GIB:.1f}", f"{phase.available / GIB:.1f}"
        table.add_row(phase.name, phase.where, _parts(phase), *numbers, _yes_no(phase.fits))
    return table


def _parts(phase: Phase) -> str:
    return ", ".join(f"{_words(name)} {size / GIB:.1f}" for name, size in phase.parts if size)


def _words(name: str) -> str:
    """What a part is called on the page."""
    return {"step": "activations, loss", "full_request": "one full request"}.get(name, name.replace("_", " "))


def _engines(plan: Plan) -> RenderableType | None:
    engines = plan.engines
    if engines is None or not (engines.engines or engines.external):
        return None
    if not engines.engines:
        return _pairs("engines", [("running already", ", ".join(engines.external))])
    table = _table("engines: GPUs are counted over the run")
    for column in ("engines", "kind", "GPUs", "nodes each", "parallel inside"):
        table.add_column(column, overflow="fold")
    for group in dict.fromkeys(engine.group for engine in engines.engines):
        mine = [engine for engine in engines.engines if engine.group == group]
        slots = spans([slot for engine in mine for slot in engine.slots])
        size, p = mine[0].num_gpus, mine[0].parallel
        inside = [
            f"{name} {n}"
            for name, n in (("tp", p.tp), ("pp", p.pp), ("dp", p.dp), ("cp", p.cp), ("ep", p.ep))
            if n > 1
        ]
        table.add_row(
            spans([engine.rank for engine in mine]),
            f"{mine[0].model} ({mine[0].worker_type})",
            f"{slots}: {size} each",
            str(len(mine[0].nodes)),
            ", ".join(inside) or "one GPU",
        )
    return table


def _generation(plan: Plan) -> RenderableType | None:
    if not plan.generation:
        return None
    table = _table("memory of a GPU of an engine, GiB, and what its cache holds")
    table.add_column("engines", no_wrap=True)
    for column in ("weights", "cache", "kB a token", "tokens an engine", "full requests"):
        table.add_column(column, justify="right")
    for group in plan.generation:
        m = group.memory
        sizes = [f"{size / GIB:.1f}" for size in (m.weights, m.cache)]
        full = f"{m.requests_at_context:,} of {m.context:,}" if m.context else "-"
        table.add_row(f"{group.name} x {group.engines}", *sizes, f"{m.kv_per_token / 1000:.1f}", f"{m.tokens:,}", full)
    return table


def _host(plan: Plan) -> RenderableType | None:
    h = plan.host
    if h is None:
        return None
    parts = [
        ("processes", h.processes),
        ("optimizer", h.optimizer),
        ("reference and old weights", h.replicas),
        ("trainer moved off the GPU", h.offload),
        ("engine weights", h.engine_backup),
    ]
    named = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts if size)
    return _pairs("host memory", [("fullest node", f"{gigabytes(h.total)}: {named}")])


def _batch(plan: Plan) -> RenderableType | None:
    b = plan.batch
    if b is None:
        return None
    rollouts = "" if b.rollouts is None else f"{b.rollouts:,} rollouts of "
    steps = f"{b.steps} optimizer step{'s' if b.steps > 1 else ''} of {b.samples_per_step:,} samples"
    low, high = b.micro_batches.least, b.micro_batches.most
    passes = f"{low}" if low == high else f"{low} to {high}"
    packed = "" if b.capacity is None else f", up to {b.capacity:,} tokens packed in each"
    rows = [
        ("samples", f"{rollouts}{b.prompts:,} prompts x {b.samples_per_prompt} = {b.samples:,} samples"),
        ("steps", steps + (f"; {b.untrained} samples are left over and not trained" if b.untrained else "")),
        ("data-parallel ranks", f"{b.dp_size}, on average {b.samples_per_rank:g} samples each a step"),
        ("micro-batches", f"{passes} a rank and step{packed}"),
    ]
    if b.prompts_in_flight > b.prompts:
        rows.append(("oversampling", f"{b.prompts_in_flight:,} prompts are generated at a time"))
    if b.longest_sample is not None:
        rows.append(("longest sample", f"{b.longest_sample:,} tokens, {b.longest_on_gpu:,} of a micro-batch on a GPU"))
    for e in b.evaluations:
        cap = "" if e.max_response_tokens is None else f", responses up to {e.max_response_tokens:,} tokens"
        rows.append((f"evaluation {e.name}", f"{e.samples_per_prompt} samples a prompt{cap}"))
    return _pairs("batches", rows)


def _weight_sync(plan: Plan) -> RenderableType | None:
    s = plan.weight_sync
    if s is None:
        return None
    per_stage = [stage.bytes for stage in s.stages]
    senders = spans([stage.sender for stage in s.stages])
    rows = [
        (s.transport, s.explains),
        ("size", f"{gigabytes(s.bytes)} in {s.buckets:,} buckets; a stage sends up to {gigabytes(max(per_stage))}"),
        ("from", f"rank{'s' if len(s.stages) > 1 else ''} {senders}, one a pipeline stage"),
        ("to", f"{s.engines} engines on {s.receivers} GPUs, {s.requests:,} requests"),
        ("time", f"{s.seconds:.1f} s or more at {plan.assumptions.network_gb_per_s:g} GB/s a GPU"),
    ]
    return _pairs("weight update", rows)


def _checkpoint(plan: Plan) -> RenderableType | None:
    c = plan.checkpoint
    if c is None or not (c.megatron_bytes or c.hugging_face_bytes):
        return None
    rows = []
    if c.megatron_bytes:
        count = "" if not c.count else f", {c.count} of them: {gigabytes(c.count * c.megatron_bytes)}"
        every = "" if c.every is None else f" every {c.every} rollouts{count}"
        rows.append(("Megatron", gigabytes(c.megatron_bytes) + every))
    if c.hugging_face_bytes:
        rows.append(("Hugging Face", gigabytes(c.hugging_face_bytes)))
    return _pairs("checkpoints", rows)


def _table(title: str, header: bool = True) -> Table:
    shape = box.SIMPLE_HEAD if header else None
    table = Table(title=Text(title, "bold"), title_justify="left", box=shape, pad_edge=False, padding=(0, 2, 0, 0))
    table.show_header = header
    return table


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = _table(title, header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def _yes_no(yes: bool) -> Text:
    return Text("yes", "green") if yes else Text("NO", "bold red")
