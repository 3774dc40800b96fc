"""A command line read as a whole: parsed, completed, and every problem found, whether it can run or not."""

import functools
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.utils.arguments.checkpoint_facts import apply_checkpoint_facts
from slime.utils.arguments.config_file import apply_config_file
from slime.utils.arguments.derive import decisions, derive
from slime.utils.arguments.flag import Problem
from slime.utils.arguments.limits import replace_impossible
from slime.utils.arguments.namespace import Args
from slime.utils.arguments.notes import warnings
from slime.utils.arguments.parser import AddArguments, CommandLine, Grammar, unique
from slime.utils.arguments.role_config import critic_args, role_command_lines
from slime.utils.arguments.upstream import load_tables
from slime.utils.arguments.validate import validate


@dataclass(frozen=True)
class Reading:
    """What a command line says.

    args: complete also when there are problems; flags that this version cannot run keep their values.
    problems: every rule that is broken, [] for a run that may start. notices: what is legal but worth a look.
    differences: model facts that the command line states otherwise than the checkpoint's config.json.
    """

    args: Args
    problems: list[Problem]
    notices: list[str]
    differences: list[str]


def read_args(
    argv: Sequence[str],
    *,
    add_custom_arguments: AddArguments | None = None,
    environ: Mapping[str, str] | None = None,
    cache: Path | None = None,
    dry_run: bool = False,
) -> Reading:
    """Parse, complete and check. A flag whose value does not read as its type is a problem, and keeps its default.

    environ: the environment to read, `os.environ` by default. cache: directory of the upstream tables. dry_run: the
    run is planned for other machines; `--accelerator auto` then means cuda.
    """
    grammar = _grammar(cache)
    if add_custom_arguments is not None:
        grammar = Grammar(grammar.tables, add_custom_arguments=add_custom_arguments)
    command_line = grammar.read(argv)
    unread = {flag for problem in command_line.problems if problem.kind == "rule" for flag in problem.flags}
    if command_line.values["custom_config_path"]:
        command_line = apply_config_file(command_line.values["custom_config_path"], command_line, grammar)
    actor, critic = role_command_lines(command_line, grammar)
    environ = os.environ if environ is None else environ
    reading = _complete(actor, grammar, unread, environ, dry_run)
    if not reading.args.use_critic:
        return reading
    other = _complete(critic, grammar, unread, environ, dry_run)
    path = command_line.values["megatron_config_path"]
    values = other.args.replace(**critic_args(vars(other.args), critic.given, path))
    return Reading(
        reading.args.replace(critic_args=values),
        unique([*reading.problems, *other.problems]),
        unique([*reading.notices, *other.notices]),
        unique([*reading.differences, *other.differences]),
    )


def _complete(
    command_line: CommandLine, grammar: Grammar, unread: set[str], environ: Mapping[str, str], dry_run: bool
) -> Reading:
    """One role's arguments: facts of the checkpoint, derived values, checks. unread: flags whose values are lost."""
    command_line, facts, differences = apply_checkpoint_facts(command_line, grammar, dry_run)
    draft = _draft(command_line, grammar)
    draft.model_type, draft.hf_config, draft.checkpoint_facts = facts.model_type, facts.hf_config, facts.values
    asked_load = draft.load
    problems = list(command_line.problems)
    problems += replace_impossible(draft, command_line.given, grammar.defaults)
    problems += derive(draft, command_line.given, environ, dry_run)
    problems += [
        p for p in validate(draft, command_line.given, grammar.groups) if not p.flags or set(p.flags) - unread
    ]
    notices = [*command_line.notices, *decisions(draft, command_line.given)]
    notices += warnings(draft, command_line.given, asked_load)
    return Reading(Args(**vars(draft)), unique(problems), notices, differences)


@functools.cache
def _grammar(cache: Path | None) -> Grammar:
    return Grammar(load_tables(cache))


def _draft(command_line: CommandLine, grammar: Grammar) -> Namespace:
    draft = Namespace(**command_line.values)
    draft.megatron_argv = command_line.megatron_argv
    draft.critic_args = None  # the arguments of the critic's trainers, where there is a critic
    draft.sglang_overrides = grammar.sglang_overrides(command_line)
    draft.router_overrides = grammar.router_overrides(command_line)
    return draft
