"""Which decoder layers each pipeline rank of an SGLang engine holds."""

from slime.utils.layout.errors import LayoutError

PARTITION_VARIABLE = "SGLANG_PP_LAYER_PARTITION"


def engine_stages(num_layers: int, pp_size: int, partition: str | None = None) -> tuple[range, ...]:
    """0-based layers per pipeline rank, as SGLang 0.5.17 cuts them: even, the last ranks take what is left over.

    partition: the environment's SGLANG_PP_LAYER_PARTITION, layers per rank separated by commas. Raises LayoutError if
    it does not fit.
    """
    if pp_size < 1:
        raise LayoutError(("--sglang-pp-size",), f"is {pp_size}, must be >= 1")
    if partition is None:
        base, left = divmod(num_layers, pp_size)
        counts = [base + (rank >= pp_size - left) for rank in range(pp_size)]
    else:
        counts = _counts(partition)
    even = ",".join(str(len(stage)) for stage in engine_stages(num_layers, pp_size)) if partition is not None else ""
    if len(counts) != pp_size:
        says = f"lists {len(counts)} ranks ({partition}), --sglang-pp-size is {pp_size}"
        raise LayoutError((PARTITION_VARIABLE,), says, f"{PARTITION_VARIABLE}={even}")
    if sum(counts) != num_layers:
        says = f"{' + '.join(map(str, counts))} = {sum(counts)}, the model has {num_layers} layers"
        raise LayoutError((PARTITION_VARIABLE,), says, f"{PARTITION_VARIABLE}={even}")
    ends = [sum(counts[: rank + 1]) for rank in range(pp_size)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _counts(partition: str) -> list[int]:
    try:
        counts = [int(text) for text in partition.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 0:
        raise LayoutError((PARTITION_VARIABLE,), f"is {partition!r}, must be layers per rank such as 38,40")
    return counts
