"""The command line: `from slime.utils.arguments import parse_args; args = parse_args()`.

Parsed from tables (`groups/`, `upstream.py`), completed once (`derive.py`), checked as a whole (`validate.py`), then
read-only.
Imports no torch, Megatron, SGLang, Ray or transformers.
"""

import functools
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.utils.arguments.config_file import apply_config_file
from slime.utils.arguments.derive import derive
from slime.utils.arguments.flag import ArgumentsError, Problem
from slime.utils.arguments.namespace import Args
from slime.utils.arguments.notes import warnings
from slime.utils.arguments.parser import AddArguments, CommandLine, Grammar, print_help
from slime.utils.arguments.upstream import load_tables
from slime.utils.arguments.validate import validate

__all__ = ["Args", "ArgumentsError", "build_args", "parse_args"]

logger = logging.getLogger(__name__)

USAGE_ERROR = 2


def parse_args(argv: Sequence[str] | None = None, *, add_custom_arguments: AddArguments | None = None) -> Args:
    """The arguments of this process, for entry points: prints help or every problem and exits (code 0 or 2).

    argv: tokens without the program's name, `sys.argv[1:]` by default. add_custom_arguments: f(parser) -> parser that
    registers further flags; where they clash with slime's, slime's win. Reads RAY_ADDRESS, WANDB_MODE, XDG_CACHE_HOME.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    for index, token in enumerate(argv):
        if token in ("-h", "--help"):
            topic = next((word for word in argv[index + 1 : index + 2] if not word.startswith("-")), None)
            raise SystemExit(print_help(topic, load_tables))
    try:
        return build_args(argv, add_custom_arguments=add_custom_arguments)
    except ArgumentsError as error:
        sys.stderr.write(f"train.py: {error}\n")
        raise SystemExit(USAGE_ERROR) from error


def build_args(
    argv: Sequence[str],
    *,
    add_custom_arguments: AddArguments | None = None,
    environ: Mapping[str, str] | None = None,
    cache: Path | None = None,
) -> Args:
    """Parse, complete and check. Raises ArgumentsError, a ValueError, with every problem found.

    environ: the environment to read, `os.environ` by default. cache: directory of the upstream tables.
    """
    grammar = _grammar(cache)
    if add_custom_arguments is not None:
        grammar = Grammar(grammar.tables, add_custom_arguments=add_custom_arguments)
    try:
        command_line = grammar.read(argv)
    except ValueError as error:  # a value that does not read as its flag's type: argparse stops at the first
        raise ArgumentsError([Problem((), str(error))]) from error
    if command_line.values["custom_config_path"]:
        command_line = apply_config_file(command_line.values["custom_config_path"], command_line, grammar)
    draft = _draft(command_line, grammar)
    asked_load = draft.load
    problems = list(command_line.problems)
    problems += derive(draft, command_line.given, os.environ if environ is None else environ)
    problems += validate(draft, command_line.given, grammar.groups)
    if problems:
        raise ArgumentsError(problems)
    _warn([*command_line.notices, *warnings(draft, command_line.given, asked_load)])
    return Args(**vars(draft))


@functools.cache
def _grammar(cache: Path | None) -> Grammar:
    return Grammar(load_tables(cache))


def _draft(command_line: CommandLine, grammar: Grammar) -> Namespace:
    draft = Namespace(**command_line.values)
    draft.megatron_argv = command_line.megatron_argv
    draft.sglang_overrides = grammar.sglang_overrides(command_line)
    draft.router_overrides = grammar.router_overrides(command_line)
    return draft


def _warn(sentences: Sequence[str]) -> None:
    if sentences:
        logger.warning("arguments to look at again:\n%s", "\n".join(f"  - {sentence}" for sentence in sentences))
