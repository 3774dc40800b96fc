"""What a dynamic sampling filter answers for one group of samples, and the one place where a filter is called."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    """keep: train on the group. reason: why not, becomes the metric rollout/dynamic_filter/drop_<reason>.

    keep_when_insufficient: keep the group after all when dropping it would mean drawing more prompts.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, args: Namespace, group: list) -> DynamicFilterOutput:
    """Ask `fn(args, group)`; no filter keeps everything, and a bare truthy or falsy answer is accepted."""
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(args, group)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(output))
