"""Which decoder layers, embedding, output layer and MTP layers each (virtual) pipeline stage holds.

The rules are megatron-core 0.19.2's: argument validation, TransformerConfig, and the functions that build layers.
"""

from argparse import Namespace
from collections.abc import Sequence

from slime.utils.layout.chunks import Chunk, PipelineLayout
from slime.utils.layout.divisors import largest_divisor
from slime.utils.layout.errors import LayoutError
from slime.utils.layout.index_sharing import index_sharing
from slime.utils.layout.splits import balanced_counts, equal_middle_splits
from slime.utils.layout.stage_string import parse_stages, stage_string

PP = "--pipeline-model-parallel-size"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
VIRTUAL_LAYERS, VIRTUAL_STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
LAYOUT = "--pipeline-model-parallel-layout"


def pipeline_layout(a: Namespace) -> PipelineLayout:
    """The layout that Megatron's pipeline flags give.

    Raises LayoutError where Megatron would refuse them, and for an uneven split without pipeline parallelism.
    """
    if not a.num_layers or a.num_layers < 1:
        raise LayoutError(("--num-layers",), f"is {a.num_layers}, must be >= 1")
    if a.pipeline_model_parallel_size < 1:
        raise LayoutError((PP,), f"is {a.pipeline_model_parallel_size}, must be >= 1", f"{PP} 1")
    _check_one_way(a)
    if getattr(a, "hybrid_layer_pattern", None):
        raise LayoutError(("--hybrid-layer-pattern",), "describes hybrid models, which are not planned; leave it out")
    stages = _stages_of_string(a) if a.pipeline_model_parallel_layout is not None else _stages_of_counts(a)
    layout = _number(stages, a.pipeline_model_parallel_size)
    _check_interleaving(a, layout.vp_size)
    return layout


def _check_one_way(a: Namespace) -> None:
    """At most one way to ask for virtual stages, and at most one to make stages uneven."""
    ways = [flag for flag in (VIRTUAL_LAYERS, VIRTUAL_STAGES, LAYOUT) if _given(a, flag)]
    if len(ways) > 1:
        raise LayoutError(
            tuple(ways), "each fixes the virtual stages; give one", f"leave out {' and '.join(ways[1:])}"
        )
    uneven = [flag for flag in (FIRST, LAST) if _given(a, flag)]
    accounts = [flag for flag in (EMBEDDING, LOSS) if _given(a, flag)]
    if _given(a, LAYOUT) and uneven + accounts:
        says = "describes every stage already, which leaves nothing to these flags"
        raise LayoutError((LAYOUT, *uneven, *accounts), says, f"leave out {' and '.join(uneven + accounts)}")
    if uneven and accounts:
        says = "both shift layers between the stages; Megatron takes one kind of them"
        raise LayoutError((*uneven, *accounts), says, f"leave out {' and '.join(accounts)}")
    if uneven and a.pipeline_model_parallel_size == 1:
        raise LayoutError(tuple(uneven), f"has no meaning with {PP} 1; leave it out")
    if uneven and _given(a, VIRTUAL_LAYERS):
        says = f"an uneven split asks for virtual stages by {VIRTUAL_STAGES}"
        raise LayoutError((VIRTUAL_LAYERS, *uneven), says, f"leave out {VIRTUAL_LAYERS}")


def _stages_of_string(a: Namespace) -> list[str]:
    """The stages of --pipeline-model-parallel-layout in forward order, one letter per layer: E, t, m, L."""
    pp, mtp = a.pipeline_model_parallel_size, a.mtp_num_layers or 0
    example = f"{LAYOUT} {stage_string(_balanced(a), mtp)}"
    try:
        stages = parse_stages(a.pipeline_model_parallel_layout)
    except ValueError as error:
        raise LayoutError((LAYOUT,), str(error), example) from error
    letters = "".join(stages)
    for wrong, says in (
        (len(stages) % pp, f"describes {len(stages)} stages, not a multiple of {PP} {pp}"),
        (not letters.startswith("E") or letters.count("E") != 1, "needs one E (embedding), and it comes first"),
        (not letters.endswith("L") or letters.count("L") != 1, "needs one L (loss), and it comes last"),
        (
            letters.count("t") != a.num_layers,
            f"describes {letters.count('t')} decoder layers (t), --num-layers is {a.num_layers}",
        ),
        (letters.count("m") != mtp, f"describes {letters.count('m')} MTP layers (m), --mtp-num-layers is {mtp}"),
        ("t" in letters.partition("m")[2], "places a decoder layer (t) after an MTP layer (m)"),
        (any("m" in stage for stage in stages[:-pp]), "places MTP layers (m) before the last virtual stages"),
        (sum("m" in stage for stage in stages) > 1, "spreads the MTP layers (m) over several stages"),
    ):
        if wrong:
            raise LayoutError((LAYOUT,), f"{a.pipeline_model_parallel_layout} {says}", example)
    return stages


def _stages_of_counts(a: Namespace) -> list[str]:
    """As `_stages_of_string`, from the flags that count layers."""
    pp, vp = a.pipeline_model_parallel_size, 1
    counts = _layers_per_rank(a)
    if _given(a, VIRTUAL_LAYERS):
        each = a.num_layers_per_virtual_pipeline_stage
        if each < 1 or counts[0] % each:
            says = f"{each} does not divide the {counts[0]} layers of a pipeline stage"
            raise LayoutError((VIRTUAL_LAYERS,), says, f"{VIRTUAL_LAYERS} {largest_divisor(counts[0], each)}")
        vp = counts[0] // each
    elif _given(a, VIRTUAL_STAGES):
        vp = a.num_virtual_stages_per_pipeline_rank
        wrong = sorted({count for count in counts if vp < 1 or count % vp})
        if wrong:
            says = f"{vp} does not divide the {' and '.join(map(str, wrong))} layers of a pipeline stage"
            legal = next((n for n in range(min(vp, min(counts)), 0, -1) if all(c % n == 0 for c in counts)), 1)
            raise LayoutError((VIRTUAL_STAGES,), says, f"{VIRTUAL_STAGES} {legal}")
    if vp > 1 and pp == 2 and _given(a, FIRST) and _given(a, LAST):
        says = f"with {PP} 2 no stage is left between them, by which Megatron's interleaved schedule counts"
        raise LayoutError((FIRST, LAST), says, f"leave out {LAST}: the last stage takes the rest anyhow")
    stages = ["t" * (counts[rank] // vp) for _ in range(vp) for rank in range(pp)]
    # Embedding and loss that are accounted for take the place of a layer; the others come on top.
    first = stages[0][1:] if _given(a, EMBEDDING) else stages[0]
    stages[0] = "E" + first
    last = stages[-1][:-1] if _given(a, LOSS) else stages[-1]
    stages[-1] = last + "m" * (a.mtp_num_layers or 0) + "L"
    return stages


def _layers_per_rank(a: Namespace) -> list[int]:
    """Layers of each pipeline rank; embedding and loss count as layers if they are accounted for."""
    pp, ends = a.pipeline_model_parallel_size, _ends(a)
    for flag, count in ends.items():
        if count < 1:
            raise LayoutError((flag,), f"is {count}, must be >= 1", _split_hint(a))
    rest, stages = _rest(a, pp)
    if not _tiles(rest, stages):
        says = f"{a.num_layers} layers"
        says += "".join(f" + 1 for the {'loss' if flag == LOSS else 'embedding'}" for flag in _accounts(a))
        says += "".join(
            f" - {count} on the {'first' if flag == FIRST else 'last'} stage" for flag, count in ends.items()
        )
        says += f" = {rest}" if rest != a.num_layers else ""
        says += f" do not divide into {stages} equal stages" if stages else ", but no stage is left to take the rest"
        raise LayoutError((PP, *ends, *_accounts(a)), says, _split_hint(a))
    middle = rest // stages if stages else 0
    return [ends.get(FIRST, middle), *[middle] * (pp - 2), ends.get(LAST, middle)] if pp > 1 else [rest]


def _ends(a: Namespace) -> dict[str, int]:
    """The layers given for the first and the last stage, by flag."""
    ends = {FIRST: a.decoder_first_pipeline_num_layers, LAST: a.decoder_last_pipeline_num_layers}
    return {flag: count for flag, count in ends.items() if count is not None}


def _accounts(a: Namespace) -> list[str]:
    """The flags that let embedding and loss count as layers."""
    return [flag for flag in (EMBEDDING, LOSS) if _given(a, flag)]


def _rest(a: Namespace, pp: int) -> tuple[int, int]:
    """(layers, stages) beside the ends that are given, with `pp` stages in all."""
    ends = _ends(a)
    return a.num_layers + len(_accounts(a)) - sum(ends.values()), pp - len(ends)


def _tiles(rest: int, stages: int) -> bool:
    return rest == 0 if stages == 0 else rest >= stages > 0 and rest % stages == 0


def _number(stages: Sequence[str], pp: int) -> PipelineLayout:
    chunks, layer, depth = [], 0, 0
    for index, letters in enumerate(stages):
        layers, depths = letters.count("t"), letters.count("m")
        chunks.append(
            Chunk(
                pp_rank=index % pp,
                vp_stage=index // pp,
                layers=tuple(range(layer, layer + layers)),
                embedding="E" in letters,
                head="L" in letters,
                mtp_layers=tuple(range(depth, depth + depths)),
            )
        )
        layer, depth = layer + layers, depth + depths
    return PipelineLayout(tuple(chunks), pp, len(stages) // pp)


def _check_interleaving(a: Namespace, vp: int) -> None:
    least = 2 if a.overlap_p2p_comm else 3
    if vp > 1 and a.pipeline_model_parallel_size < least:
        asked = next(flag for flag in (VIRTUAL_LAYERS, VIRTUAL_STAGES, LAYOUT) if _given(a, flag))
        without = "" if a.overlap_p2p_comm else " with --no-overlap-p2p-communication"
        says = f"{vp} virtual stages{without} need {PP} >= {least}, which is {a.pipeline_model_parallel_size}"
        raise LayoutError((asked, PP), says, f"leave out {asked}")


def _split_hint(a: Namespace) -> str:
    """Flags that make a legal pipeline of this model: uneven ends, or else fewer stages."""
    pp, vp = a.pipeline_model_parallel_size, a.num_virtual_stages_per_pipeline_rank or 1
    if not _accounts(a):
        for first, last in equal_middle_splits(a.num_layers, pp, _starts(a), max(1, vp)):
            # interleaved, two stages take one of the flags only
            return f"{FIRST} {first}" if pp == 2 and vp > 1 else f"{FIRST} {first} {LAST} {last}"
    ends = _ends(a)
    if min(ends.values(), default=1) >= 1:
        for size in range(pp, 1 if ends else 0, -1):
            if _tiles(*_rest(a, size)):
                return f"{PP} {size}"
    return f"leave out {' and '.join(ends)}"


def _balanced(a: Namespace) -> tuple[int, ...]:
    """Layers per stage of an even layout; some stages stay empty when there are more stages than layers."""
    pp = a.pipeline_model_parallel_size
    even = balanced_counts(a.num_layers, pp, _starts(a)) or balanced_counts(a.num_layers, pp)
    return even or (1,) * a.num_layers + (0,) * (pp - a.num_layers)


def _starts(a: Namespace) -> tuple[bool, ...] | None:
    """Per layer, whether a stage may begin there; None where all may, or where that is a problem of its own."""
    try:
        sharing = index_sharing(a)
    except LayoutError:
        return None
    return sharing.computes if sharing else None


def _given(a: Namespace, flag: str) -> bool:
    value = getattr(a, flag.removeprefix("--").replace("-", "_"))
    return value is not None and value is not False
