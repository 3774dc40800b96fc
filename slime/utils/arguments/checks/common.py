"""What the checks share: which half of a run a check is about, integer arithmetic, and facts of the model.

A model fact comes from the arguments, which hold what config.json says unless the command line overrides it.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slime.utils.arguments.flag import Problem

Check = Callable[[Namespace, Mapping[str, str]], Iterator[Problem]]


def of_trainer(check: Check) -> Check:
    """The check holds only for runs that build a trainer."""

    @functools.wraps(check)
    def scoped(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
        return iter(()) if a.debug_rollout_only else check(a, given)

    return scoped


def of_engines(check: Check) -> Check:
    """The check holds only for runs that start engines."""

    @functools.wraps(check)
    def scoped(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
        idle = a.debug_train_only or a.rollout_num_gpus == 0 or a.rollout_num_gpus_per_engine < 1
        return iter(()) if idle else check(a, given)

    return scoped


def round_up(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `number` and not 0."""
    return max(1, -(-number // unit)) * unit


def listed(values: list, limit: int = 12) -> str:
    """ "1, 2, 3", cut after `limit` values."""
    shown = ", ".join(str(value) for value in values[:limit])
    return shown + (", ..." if len(values) > limit else "")


def model_config(a: Namespace) -> Mapping[str, Any]:
    """The language model's part of config.json; empty when there is none."""
    return a.hf_config or {}


def first_of(config: Mapping[str, Any], *keys: str) -> Any:
    """The first value that is there and not null."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def kv_groups(a: Namespace) -> int | None:
    """Heads of keys and values: Megatron's --num-query-groups counts only with --group-query-attention."""
    return a.num_query_groups if a.group_query_attention else a.num_attention_heads


def head_dim(a: Namespace) -> int | None:
    """Width of one attention head, None while the model is not described."""
    if a.kv_channels:
        return a.kv_channels
    if not a.hidden_size or not a.num_attention_heads:
        return None
    return a.hidden_size // a.num_attention_heads


def is_interleaved(a: Namespace) -> bool:
    """Whether pipeline ranks hold several virtual stages."""
    return bool(a.num_layers_per_virtual_pipeline_stage or (a.num_virtual_stages_per_pipeline_rank or 1) > 1)
