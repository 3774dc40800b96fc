"""What a rollout function returns, and the one place where it is called.

Plug-ins import these names; nothing here knows how samples are made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.types import Sample


@dataclass
class RolloutFnTrainOutput:
    """samples: any nesting of lists with Sample leaves, usually [group][sample]. metrics: flat, name -> number."""

    samples: list
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """data: {dataset: {"rewards": [...], "truncated": [...], "samples": [Sample, ...]}}, three lists of one length."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function and wrap a bare return value (a list of samples, an eval dict) in its output type.

    Raises TypeError when the function returns neither form.
    """
    output = fn(*args, **kwargs, evaluation=evaluation)
    wanted, bare = (RolloutFnEvalOutput, dict) if evaluation else (RolloutFnTrainOutput, list)
    if isinstance(output, wanted):
        return output
    if isinstance(output, bare):
        return wanted(output)
    name = getattr(fn, "__qualname__", repr(fn))
    raise TypeError(
        f"rollout function {name}(evaluation={evaluation}) must return {wanted.__name__} or a {bare.__name__}, got "
        f"{output!r:.200}"
    )


def flatten_samples(data: list) -> list[Sample]:
    """All Sample leaves of a nested list, depth first, checking that split executions are marked as such.

    A list of more than one Sample below another list below the prompt level (prompt -> execution -> siblings) is one
    execution that was split; its siblings must share a rollout_id that is not None, because loss weights count
    executions. Raises ValueError otherwise, TypeError for a leaf that is not a Sample.
    """
    leaves: list[Sample] = []
    _collect(data, 0, leaves)
    return leaves


def _collect(node: list | Sample, depth: int, leaves: list[Sample]) -> None:
    if isinstance(node, Sample):
        leaves.append(node)
        return
    if not isinstance(node, list):
        raise TypeError(
            f"a rollout must be nested lists of Sample, found {type(node).__name__} at depth {depth}: {node!r:.200}"
        )
    siblings = [child for child in node if isinstance(child, Sample)]
    if depth >= 2 and len(siblings) > 1:
        ids = {sample.rollout_id for sample in siblings}
        if len(ids) > 1 or None in ids:
            raise ValueError(
                f"group {siblings[0].group_index}: {len(siblings)} samples split from one execution have rollout_id "
                f"{sorted(map(str, ids))}; a generate function that returns a list must give all its samples the same "
                f"rollout_id"
            )
    for child in node:
        _collect(child, depth + 1, leaves)
