"""Runs every check on the completed draft and returns all problems at once; changes nothing."""

from argparse import Namespace
from collections.abc import Iterable, Mapping

from slime.utils.arguments.checks import (
    algorithm,
    batch,
    engines,
    experts,
    files,
    hooks,
    lengths,
    model,
    optimizer,
    outputs,
    overlap,
    parallel,
    pipeline,
    precision,
    recompute,
    resources,
    rewards,
    serving,
)
from slime.utils.arguments.flag import FlagGroup, Problem

CHECKS = (
    *batch.CHECKS,
    *lengths.CHECKS,
    *algorithm.CHECKS,
    *rewards.CHECKS,
    *model.CHECKS,
    *parallel.CHECKS,
    *pipeline.CHECKS,
    *experts.CHECKS,
    *precision.CHECKS,
    *optimizer.CHECKS,
    *recompute.CHECKS,
    *overlap.CHECKS,
    *resources.CHECKS,
    *engines.CHECKS,
    *serving.CHECKS,
    *files.CHECKS,
    *outputs.CHECKS,
    *hooks.CHECKS,
)


def validate(a: Namespace, given: Mapping[str, str], groups: Iterable[FlagGroup]) -> list[Problem]:
    """All problems of the draft `a`, each once. given: dest -> option of everything the user set."""
    required = [flag for group in groups for flag in group.flags if flag.required and getattr(a, flag.dest) is None]
    problems = [Problem((flag.name,), f"is required: {flag.help}") for flag in required]
    for check in CHECKS:
        problems += check(a, given)
    return list(dict.fromkeys(problems))
