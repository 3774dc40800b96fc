"""`python train.py ... --dry-run`: reads the arguments, prints the plan, and tells by the exit code if it starts."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from slime.plan.as_json import dumps, to_json
from slime.plan.plan import Plan, make_plan
from slime.plan.render import print_plan
from slime.utils.arguments import parse_args
from slime.utils.arguments.flag import ArgumentsError, Problem
from slime.utils.arguments.reading import read_args

USAGE_ERROR = 2


def dry_run(argv: Sequence[str] | None = None) -> int:
    """The entry point of a dry run; returns the exit code. argv: tokens, `sys.argv[1:]` by default."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(argv):
        parse_args(argv)  # prints help and exits
    try:
        plan, json_path = plan_of(argv, environ=os.environ)
    except ArgumentsError as error:
        sys.stderr.write(f"train.py: {error}\n")
        return USAGE_ERROR
    write_plan(plan, json_path, sys.stdout)
    return plan.exit_code


def refuse(argv: Sequence[str], *, environ: Mapping[str, str], elsewhere: bool = False) -> None:
    """Raises ArgumentsError with all the problems for which a run with these flags would end before it starts.

    elsewhere: the run is for other machines, so that this one's files and devices decide nothing.
    """
    problems = read_args(argv, environ=environ, dry_run=elsewhere).problems
    problems = [problem for problem in problems if not (elsewhere and problem.kind == "absent")]
    if problems:
        raise ArgumentsError(problems)


def plan_of(argv: Sequence[str], *, environ: Mapping[str, str], cache: Path | None = None) -> tuple[Plan, str | None]:
    """(plan, where its JSON goes) of a training command line. Raises ArgumentsError if the tokens cannot be parsed."""
    reading = read_args(argv, environ=environ, cache=cache, dry_run=True)
    a = reading.args
    for flag, value in (
        ("--plan-gpu-memory-gb", a.plan_gpu_memory_gb),
        ("--plan-network-gb-per-s", a.plan_network_gb_per_s),
    ):
        if not value > 0:
            raise ArgumentsError([Problem((flag,), f"is {value:g}, must be > 0")])
    if a.plan_hf_config is not None and not os.path.exists(a.plan_hf_config):
        raise ArgumentsError([Problem(("--plan-hf-config",), f"{a.plan_hf_config} does not exist")])
    plan = make_plan(reading, gpu_memory_gb=a.plan_gpu_memory_gb, network_gb_per_s=a.plan_network_gb_per_s)
    return plan, a.plan_json


def write_plan(plan: Plan, json_path: str | None, stream: IO[str], rank: int = 0) -> None:
    """Print the plan for people, and its JSON to a file; with "-" the JSON alone is printed."""
    if json_path == "-":
        stream.write(dumps(to_json(plan)))
        return
    print_plan(plan, stream, rank)
    if json_path is not None:
        Path(json_path).write_text(dumps(to_json(plan)), encoding="utf-8")
