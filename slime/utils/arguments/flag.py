"""The vocabulary of the command line: a flag, a group of flags, and a problem with the values they were given.

Knows nothing of any particular flag; the tables are in `groups/` (slime's own) and `upstream.py` (Megatron's, SGLang's
and the router's).
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["value", "switch", "off", "tristate", "append", "const", "ignored"]
ProblemKind = Literal["rule", "unsupported", "absent"]


@dataclass(frozen=True)
class Flag:
    """One row of a table: an option and what its value means.

    kind: "value" takes `nargs` values of `type`; "switch" stores True; "off" stores False under `dest`;
        "tristate" adds `--no-...` and stays at `default` when neither is given; "append" collects repeated values;
        "const" stores `const`; "ignored" is accepted and dropped (a name that upstream deprecated).
    supported: False refuses the flag, because this version does not implement it; `unsupported_choices` refuse values.
    opaque: the driver keeps the text; only the upstream parser knows how to read it.
    deprecated: the notice to print when the flag is used; deprecated_values: (value, its successor) pairs.
    """

    name: str
    type: Callable[[str], Any] = str
    default: Any = None
    help: str = ""
    kind: Kind = "value"
    dest: str = ""
    aliases: tuple[str, ...] = ()
    nargs: int | str | None = None
    choices: tuple | None = None
    const: Any = None
    required: bool = False
    supported: bool = True
    unsupported_choices: tuple = ()
    opaque: bool = False
    deprecated: str = ""
    deprecated_values: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.dest:
            object.__setattr__(self, "dest", self.name.lstrip("-").replace("-", "_"))

    @property
    def options(self) -> tuple[str, ...]:
        """Every option string of this row, `--no-...` of a tristate included."""
        names = (self.name, *self.aliases)
        if self.kind != "tristate":
            return names
        return names + tuple("--no-" + name[2:] for name in names if not name.startswith("--no-"))

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Register this row with argparse. Required flags are left to the checks: one run shows all problems."""
        names, common = (self.name, *self.aliases), {"dest": self.dest, "help": self.help.replace("%", "%%")}
        match self.kind:
            case "switch":
                parser.add_argument(*names, action="store_true", default=self.default, **common)
            case "off":
                parser.add_argument(*names, action="store_false", default=True, **common)
            case "tristate":
                parser.add_argument(*names, action=argparse.BooleanOptionalAction, default=self.default, **common)
            case "const":
                parser.add_argument(*names, action="store_const", const=self.const, default=self.default, **common)
            case "ignored":
                parser.add_argument(*names, action="store_true", default=argparse.SUPPRESS, **common)
            case "value" | "append":
                action = "append" if self.kind == "append" else "store"
                default = list(self.default) if isinstance(self.default, list) else self.default
                parser.add_argument(
                    *names,
                    action=action,
                    type=self.type,
                    nargs=self.nargs,
                    choices=self.choices,
                    default=default,
                    metavar=None if self.choices else type_name(self.type).upper(),
                    **common,
                )

    def tokens(self, value: Any) -> list[str]:
        """The command-line words that set this row to `value`; [] when its default is what they would say."""
        match self.kind:
            case "switch" | "off":
                return [self.name] if value is (self.kind == "switch") else []
            case "tristate":
                return [] if value is None else [self.name if value else "--no-" + self.name[2:]]
            case "const":
                return [self.name] if value == self.const else []
        if value is None:
            return []
        if self.kind == "append":
            return [token for item in value for token in (self.name, str(item))]
        return [self.name, *map(str, value if isinstance(value, list) else [value])]

    def coerce(self, value: Any) -> Any:
        """Give a YAML value the type the command line would have given it: the text "1e-4" of a float flag is 1e-4.

        Raises ValueError when the text does not read as that type or is not one of the choices.
        """
        if self.kind in ("switch", "off", "tristate"):
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"takes true or false, got {value!r}")
            return value
        if value is None and self.default is not None:
            raise ValueError(f"is empty; the default is {self.default}")
        if isinstance(value, list):
            return [self._coerce_one(item) for item in value]
        one = self._coerce_one(value)
        return [one] if value is not None and (self.nargs or self.kind == "append") else one

    def _coerce_one(self, value: Any) -> Any:
        if isinstance(value, str) and not self.opaque and self.type is not str:
            try:
                value = self.type(value)
            except argparse.ArgumentTypeError as error:
                raise ValueError(str(error)) from error
        elif self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        elif self.type in (int, float) and value is not None and not isinstance(value, self.type):
            raise ValueError(f"takes {type_name(self.type)}, got {value!r}")
        if self.choices and value is not None and value not in self.choices:
            raise ValueError(f"is {value!r}, must be one of {', '.join(map(str, self.choices))}")
        return value


@dataclass(frozen=True)
class FlagGroup:
    """A named table of flags; the title is what `--help` prints above it."""

    name: str
    title: str
    flags: Sequence[Flag]


@dataclass(frozen=True)
class Problem:
    """A rule that the given values break: the flags, what is wrong (with the arithmetic), and a legal value.

    kind: "rule", never legal; "unsupported", legal, but this version cannot run it; "absent", a file, directory or
    module that is not on this machine, which need not be the machine that the run is planned for.
    """

    flags: tuple[str, ...]
    says: str
    try_: str = ""
    kind: ProblemKind = "rule"

    def __str__(self) -> str:
        hint = f"\n      try: {self.try_}" if self.try_ else ""
        return f"{', '.join(self.flags)}: {self.says}{hint}" if self.flags else f"{self.says}{hint}"


class ArgumentsError(ValueError):
    """The command line breaks rules; `problems` holds every one that was found."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__(f"{count} in the arguments\n" + "\n".join(f"  - {problem}" for problem in self.problems))


def switch(name: str, help: str, **kw: Any) -> Flag:
    """A flag without a value, False unless given."""
    return Flag(name, bool, False, help, kind="switch", **kw)


def off(name: str, dest: str, help: str) -> Flag:
    """A flag without a value that turns `dest` from True to False."""
    return Flag(name, bool, True, help, kind="off", dest=dest)


def tristate(name: str, help: str, **kw: Any) -> Flag:
    """`--x` / `--no-x`; None while neither is given."""
    return Flag(name, bool, None, help, kind="tristate", **kw)


def json_value(text: str) -> Any:
    """Argument type for a JSON text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {text!r} ({error})") from error


def json_object(text: str) -> dict:
    """Argument type for a JSON object."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object such as {{"key": "value"}}, got {text!r}')
    return value


def scaled_int(text: str) -> int:
    """Argument type for an integer that may carry k, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (powers of 1024)."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?", text.strip())
    if not match or ("." in match[1] and (not match[2] or match[2].endswith("i"))):
        raise argparse.ArgumentTypeError(f"not an integer: {text!r} (legal: 4096, 4k, 4.5k, 4Ki)")
    number, suffix = match.groups()
    if not suffix:
        return int(number)
    base, power = (1024 if suffix.endswith("i") else 1000), "kmgt".index(suffix[0].lower()) + 1
    return round(float(number) * base**power)


def type_name(type_: Callable) -> str:
    """How help and messages call a value's type."""
    names = {json_value: "json", json_object: "json", scaled_int: "int"}
    return names.get(type_, getattr(type_, "__name__", "value"))
