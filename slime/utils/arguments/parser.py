"""One argparse parser over all tables, and the question which command-line tokens belong to whom."""

import argparse
import copy
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from slime.utils.arguments.flag import Flag, FlagGroup, Problem
from slime.utils.arguments.groups import GROUPS
from slime.utils.arguments.upstream import ROUTER_DEFAULTS, ROUTER_FIELDS, UpstreamTables
from slime.utils.model_facts import RECIPE_FLAGS

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class CommandLineParser(argparse.ArgumentParser):
    """argparse with abbreviations off, whose errors are exceptions instead of an exit of the process."""

    def __init__(self) -> None:
        super().__init__(
            prog="train.py", allow_abbrev=False, add_help=False, conflict_handler="resolve", exit_on_error=False
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@dataclass(frozen=True)
class CommandLine:
    """What the user typed. values: every dest with its value; given: the dests the user set, with the option used.

    megatron_argv: the tokens of flags that Megatron knows too, in order. problems: unknown and unsupported flags.
    notices: deprecated flags in use, and flags given twice with different values.
    """

    values: dict[str, Any]
    given: dict[str, str]
    megatron_argv: list[str]
    problems: list[Problem]
    notices: list[str]


@dataclass(frozen=True)
class Grammar:
    """All flags: slime's rows, and of each upstream table the rows whose options slime does not define itself."""

    tables: UpstreamTables
    groups: Sequence[FlagGroup] = GROUPS
    add_custom_arguments: AddArguments | None = None
    _custom_options: set[str] = field(default_factory=set)

    @cached_property
    def slime_options(self) -> dict[str, Flag]:
        """Option string -> slime's row."""
        return _by_option(flag for group in self.groups for flag in group.flags)

    @cached_property
    def megatron_options(self) -> frozenset[str]:
        """Every option string that Megatron's own parser knows."""
        return frozenset(_by_option(self.tables.megatron.flags))

    @cached_property
    def options(self) -> dict[str, Flag]:
        """Option string -> row, slime's rows winning."""
        upstream = [*self.tables.megatron.flags, *self.tables.sglang.flags, *self.tables.router.flags]
        return {**_by_option(upstream), **self.slime_options}

    @cached_property
    def by_dest(self) -> dict[str, Flag]:
        """Attribute name -> the row that gives it its type."""
        rows: dict[str, Flag] = {}
        # a deprecated name gives the type only where no current flag has that attribute
        for flag in sorted(self.options.values(), key=lambda flag: bool(flag.deprecated)):
            if flag.kind != "ignored":
                rows.setdefault(flag.dest, flag)
        rows.update({flag.dest: flag for flag in self.slime_options.values()})
        return rows

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Attribute name -> its value where nobody gives it."""
        return {dest: flag.default for dest, flag in self.by_dest.items()}

    @cached_property
    def parser(self) -> CommandLineParser:
        """The argparse parser. Custom arguments come first, so that slime's rows win a clash."""
        parser = CommandLineParser()
        if self.add_custom_arguments is not None:
            parser = self.add_custom_arguments(parser)
            self._custom_options.update(parser._option_string_actions)
        for group in self.groups:
            for flag in group.flags:
                flag.add_to(parser)
        for table in (self.tables.megatron, self.tables.sglang, self.tables.router):
            for flag in table.flags:
                if not self.slime_options.keys() & set(flag.options):
                    flag.add_to(parser)
        return parser

    def read(self, argv: Sequence[str]) -> CommandLine:
        """Parse the tokens. A flag whose value cannot be read as its type is a problem, and counts as not given."""
        argv, problems = list(argv), []
        while True:
            try:
                namespace, unknown = self.parser.parse_known_args(argv)
                break
            except argparse.ArgumentError as error:  # the first of them; the others show without it
                options = set((error.argument_name or "").split("/"))
                runs = _group_tokens(argv, self.options.keys() | self._custom_options)
                option = next((option for option, _ in runs if option in options), "")
                problems.append(Problem((option,) if option else (), error.message))
                argv = _without(argv, options, self.options.keys() | self._custom_options) if option else []
        tokens = _group_tokens(argv, self.options.keys() | self._custom_options)
        problems += [self._unknown(token) for token in unknown if token.startswith("-")]
        if unknown and not problems:
            problems.append(Problem((), f"these values belong to no flag: {' '.join(unknown)}"))
        given, notices, megatron_argv, said = {}, [], [], {}
        for option, words in tokens:
            if option in self.megatron_options:
                megatron_argv += words
            if (flag := self.options.get(option)) is None:
                continue
            given[flag.dest] = option
            if flag.kind != "append" and flag.name not in RECIPE_FLAGS:  # a model's recipe is there to be overruled
                said.setdefault(flag.dest, []).append(words)
            value = getattr(namespace, flag.dest, None)
            notices += deprecations(flag, option, value)
            problems += unsupported(flag, option, value)
        notices += _contradictions(said.values())
        # the parser is used again: nobody may change its default lists through a result
        values = {dest: copy.copy(value) for dest, value in vars(namespace).items()}
        return CommandLine(values, given, megatron_argv, unique(problems), unique(notices))

    def megatron_tokens(self, flag: Flag, value: Any) -> list[str]:
        """The words for Megatron's own parser that set `flag` to `value`; [] for a flag that Megatron lacks."""
        return flag.tokens(value) if flag.name in self.megatron_options else []

    def _unknown(self, token: str) -> Problem:
        option = token.split("=", 1)[0]
        if option in self.tables.owned_options:
            return Problem((option,), f"slime sets this for every engine: {self.tables.owned_options[option]}")
        known = ["--help", *self.options, *self._custom_options]
        near = difflib.get_close_matches(option, known, n=3, cutoff=0.6)
        return Problem((option,), "unknown flag" + (f"; the nearest known: {', '.join(near)}" if near else ""))

    def sglang_overrides(self, command_line: CommandLine) -> dict[str, Any]:
        """The `--sglang-...` values that the user gave, keyed by ServerArgs field."""
        chosen = _given_values(self.tables.sglang, command_line)
        return {dest.removeprefix("sglang_"): value for dest, value in chosen.items()}

    def router_overrides(self, command_line: CommandLine) -> dict[str, Any]:
        """slime's defaults for the router and the user's `--router-...` values, keyed by RouterArgs field."""
        chosen = _given_values(self.tables.router, command_line)
        fields = {dest.removeprefix("router_"): value for dest, value in chosen.items()}
        return {**ROUTER_DEFAULTS, **{ROUTER_FIELDS.get(name, name): value for name, value in fields.items()}}


def unsupported(flag: Flag, option: str, value: Any) -> list[Problem]:
    """The problem of using a flag, or a value of it, that this version does not implement; [] when it does."""
    if not flag.supported:
        says = "is not supported yet by this version of slime; leave it out"
        return [Problem((option,), says, kind="unsupported")]
    if value is not None and value in flag.unsupported_choices:
        legal = [str(choice) for choice in flag.choices or () if choice not in flag.unsupported_choices]
        says = f"{value} is not supported yet by this version of slime"
        return [Problem((option,), says, f"{option} {'|'.join(legal)}", kind="unsupported")]
    return []


def deprecations(flag: Flag, option: str, value: Any) -> list[str]:
    """Notices about a flag, or a value of it, that upstream is about to drop."""
    notices = [f"{option} is deprecated: {flag.deprecated}"] if flag.deprecated else []
    successors = dict(flag.deprecated_values)
    if isinstance(value, str) and value in successors:
        notices.append(f"{option} {value} is deprecated: use {successors[value]}")
    return notices


def unique[Item](items: Iterable[Item]) -> list[Item]:
    """The items without repetitions, in order."""
    return list(dict.fromkeys(items))


def help_text(groups: Iterable[FlagGroup], notes: str = "") -> str:
    """Usage line and the flags of the groups, formatted by argparse."""
    parser = CommandLineParser()
    parser.usage = "python train.py [flags]"
    parser.epilog = notes
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=42, width=119)
    for group in groups:
        section = parser.add_argument_group(group.title)
        for flag in group.flags:
            _described(flag).add_to(section)
    return parser.format_help()


def print_help(topic: str | None, load_tables: Callable[[], UpstreamTables]) -> int:
    """Print slime's groups, or the group, package or flag text called `topic`. Returns the exit code."""
    if topic is None:
        names = ", ".join(group.name for group in GROUPS)
        notes = (
            "--help GROUP shows one group, --help WORD the flags with that word, --help all everything.\n"
            f"Groups: {names}, megatron, sglang, router.\n"
            "Megatron's flags are used under their own names, SGLang's as --sglang-..., the router's as --router-..."
        )
        sys.stdout.write(help_text(GROUPS, notes))
        return 0
    tables = load_tables()
    groups = [*GROUPS, tables.megatron, tables.sglang, tables.router]
    chosen = groups if topic == "all" else [group for group in groups if group.name == topic]
    if not chosen:
        word = topic.lstrip("-")
        matching = [FlagGroup(g.name, g.title, [f for f in g.flags if word in " ".join(f.options)]) for g in groups]
        chosen = [group for group in matching if group.flags]
    if not chosen:
        sys.stderr.write(f"no group and no flag called {topic}\n")
        return 2
    sys.stdout.write(help_text(chosen))
    return 0


def _described(flag: Flag) -> Flag:
    text = flag.help
    if flag.default not in (None, False, [], {}, argparse.SUPPRESS) and flag.kind != "off":
        text += f" [{flag.default}]"
    if flag.required:
        text += " Required."
    if not flag.supported:
        text = "Not supported yet. " + text
    return Flag(**{**flag.__dict__, "help": text.strip(), "dest": flag.dest})


def _given_values(table: FlagGroup, command_line: CommandLine) -> dict[str, Any]:
    dests = {flag.dest for flag in table.flags if flag.kind != "ignored"}
    return {dest: command_line.values[dest] for dest in command_line.given if dest in dests}


def _by_option(flags: Iterable[Flag]) -> dict[str, Flag]:
    return {option: flag for flag in flags for option in flag.options}


def _group_tokens(argv: Sequence[str], options: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Split the tokens at known options: [(option, [option token, its values...])]. There are no positionals."""
    known, runs, current = set(options), [], None
    for token in argv:
        name = token.split("=", 1)[0]
        if name in known:
            current = (name, [token])
            runs.append(current)
        elif token.startswith("--") and " " not in token:  # argparse, too, takes a token with a space for a value
            current = None  # an unknown flag: its values belong to nobody
        elif current is not None:
            current[1].append(token)
    return runs


def _without(argv: Sequence[str], options: Iterable[str], known: Iterable[str]) -> list[str]:
    """The tokens without these options and what follows each of them up to the next known one."""
    left, known, dropping = [], set(known), False
    for token in argv:
        name = token.split("=", 1)[0]
        if name in known or (token.startswith("--") and " " not in token):
            dropping = name in options
        if not dropping:
            left.append(token)
    return left


def _contradictions(said: Iterable[list[list[str]]]) -> list[str]:
    """Notices about flags that were given several times with different words. said: per attribute, the words."""
    notices = []
    for runs in said:
        texts = unique(" ".join(words).replace("=", " ", 1) for words in runs)
        if len(texts) > 1:
            notices.append(f"given more than once, the last wins: {', then '.join(texts)}")
    return notices
