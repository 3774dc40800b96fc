"""The command line: `from slime.utils.arguments import parse_args; args = parse_args()`.

Parsed from tables (`groups/`, `upstream.py`), completed once (`derive.py`), checked as a whole (`validate.py`), then
read-only.
Imports no torch, Megatron, SGLang, Ray or transformers.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.utils.arguments.flag import ArgumentsError, Problem
from slime.utils.arguments.namespace import Args
from slime.utils.arguments.parser import AddArguments, print_help
from slime.utils.arguments.reading import Reading, read_args
from slime.utils.arguments.upstream import load_tables

__all__ = ["Args", "ArgumentsError", "Problem", "Reading", "build_args", "parse_args", "read_args"]

logger = logging.getLogger(__name__)

USAGE_ERROR = 2


def parse_args(argv: Sequence[str] | None = None, *, add_custom_arguments: AddArguments | None = None) -> Args:
    """The arguments of this process, for entry points: prints help or every problem and exits (code 0 or 2).

    argv: tokens without the program's name, `sys.argv[1:]` by default. add_custom_arguments: f(parser) -> parser that
    registers further flags; where they clash with slime's, slime's win. Reads RAY_ADDRESS, WANDB_MODE,
    SGLANG_PP_LAYER_PARTITION, XDG_CACHE_HOME.
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
    """The arguments of a run that may start. Raises ArgumentsError, a ValueError, with every problem found.

    environ: the environment to read, `os.environ` by default. cache: directory of the upstream tables.
    """
    reading = read_args(argv, add_custom_arguments=add_custom_arguments, environ=environ, cache=cache)
    if reading.problems:
        raise ArgumentsError(reading.problems)
    _say("arguments to look at again:", reading.notices)
    _say("the command line and the checkpoint's config.json differ; the command line wins:", reading.differences)
    return reading.args


def _say(title: str, sentences: Sequence[str]) -> None:
    if sentences:
        logger.warning("%s\n%s", title, "\n".join(f"  - {sentence}" for sentence in sentences))
