"""Runs every check on the completed draft and returns all problems at once; changes nothing."""

from argparse import Namespace
from collections.abc import Iterable, Mapping

from slime.utils.arguments.checks import algorithm, batch, files, model, parallel, resources
from slime.utils.arguments.flag import FlagGroup, Problem

CHECKS = (
    *batch.CHECKS,
    *algorithm.CHECKS,
    *parallel.CHECKS,
    *resources.CHECKS,
    *files.CHECKS,
    *model.CHECKS,
)


def validate(a: Namespace, given: Mapping[str, str], groups: Iterable[FlagGroup]) -> list[Problem]:
    """All problems of the draft `a`. given: dest -> option of everything the user set."""
    required = [flag for group in groups for flag in group.flags if flag.required and getattr(a, flag.dest) is None]
    problems = [Problem((flag.name,), f"is required: {flag.help}") for flag in required]
    for check in CHECKS:
        problems += check(a, given)
    return problems
