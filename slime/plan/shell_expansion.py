"""Bash's variables and how words expand: parameters, arrays, arithmetic, tests, and the few commands whose output is
known without running them (`seq`, `echo`, `pwd`, `dirname`, `basename`)."""

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from slime.plan.shell_syntax import (
    AndOr,
    Arithmetic,
    Assignment,
    Parameter,
    Script,
    Simple,
    Substitution,
    Text,
    Unsupported,
    Word,
)


@dataclass(frozen=True)
class Unknown:
    """A value that only a run of the script can tell, and why."""

    why: str


Value = str | list[str] | Unknown
_Piece = tuple[str, bool] | None  # (text, quoted); None ends a field


class CannotTell(Exception):
    """Something depends on a value that only a run can tell."""

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


def _power(base: int, exponent: int) -> int:
    """Modulo 2^64, which is where bash's numbers wrap around. Raises ValueError as bash refuses fractions."""
    if exponent < 0:
        raise ValueError("exponent less than 0")
    return pow(base, exponent, 1 << 64)


LONGEST = 100_000  # numbers of a `seq`
_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.Pow: _power,
    ast.LShift: lambda a, b: a << (b & 63),
    ast.RShift: lambda a, b: a >> (b & 63),
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARE: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_NUMBER_TESTS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_STEP = re.compile(r"\s*(?:(?P<a>\w+)\s*(?P<after>\+\+|--)|(?P<before>\+\+|--)\s*(?P<b>\w+))\s*")
_SET = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?P<sign>[-+*/%]?)=(?!=)(?P<value>.+)", re.DOTALL)


class Expansion:
    """The variables at one point of a script. nounset: `set -u` is on."""

    def __init__(self, variables: dict[str, Value], settings: dict[str, str], directory: str):
        self.variables: dict[str, Value] = {**variables, **settings}
        self.settings = settings
        self.directory = directory
        self.file = ""
        self.positional: list[str] | Unknown = []
        self.nounset = False
        self.notes: list[str] = []

    def at(self, line: int) -> str:
        """file:line."""
        return f"{self.file}:{line}"

    def assign(self, name: str, value: Value) -> None:
        """Set a variable, unless the user has fixed it."""
        if name not in self.settings:
            self.variables[name] = value

    def value_of(self, assignment: Assignment) -> Value:
        """The value after the assignment. Raises CannotTell."""
        old = self.variables.get(assignment.name) if assignment.append else None
        if isinstance(old, Unknown):
            raise CannotTell(old.why)
        if isinstance(assignment.value, tuple):
            items = [field for word in assignment.value for field in self.fields(word)]
            return [*([old] if isinstance(old, str) else old or []), *items]
        text = self.scalar(assignment.value)
        if isinstance(old, list):
            return [old[0] + text, *old[1:]] if old else [text]
        return (old or "") + text

    def fields(self, word: Word) -> list[str]:
        """The words that bash makes of one. Raises CannotTell."""
        fields: list[str] = []
        current: str | None = None
        for piece in self._pieces(word):
            if piece is None:
                fields += [] if current is None else [current]
                current = None
                continue
            text, quoted = piece
            if quoted:
                current = (current or "") + text
                continue
            if "IFS" in self.variables and any(sign in text for sign in " \t\n"):
                raise CannotTell(f"words are split by a changed IFS at {self.at(word.line)}")
            first, *rest = re.split(r"[ \t\n]+", text)
            current = (current or "") + first if first else current
            for part in rest:
                fields += [] if current is None else [current]
                current = part or None
        return fields + ([] if current is None else [current])

    def scalar(self, word: Word) -> str:
        """The text of a word that is not split, as in an assignment. Raises CannotTell."""
        return "".join(" " if piece is None else piece[0] for piece in self._pieces(word))

    def _pieces(self, word: Word) -> Iterator[_Piece]:
        for index, part in enumerate(word.parts):
            match part:
                case Text(text, quoted):
                    if index == 0 and not quoted and (text == "~" or text.startswith("~/")):
                        text = self._home(word.line) + text[1:]
                    yield text, quoted
                case Parameter():
                    yield from self._parameter(part, word.line)
                case Arithmetic(text, quoted):
                    yield str(self.calculate(text, word.line)), quoted
                case Substitution(script, source, quoted):
                    output = self._output(script, source, word.line)
                    yield output.rstrip("\n"), quoted
                case Unsupported(source):
                    raise CannotTell(
                        f"{_short(source)} at {self.at(word.line)} is not read without running the script"
                    )

    def _home(self, line: int) -> str:
        home = self.variables.get("HOME")
        if not isinstance(home, str):
            raise CannotTell(f"HOME is not known at {self.at(line)}")
        return home

    def _parameter(self, p: Parameter, line: int) -> Iterator[_Piece]:
        value = self._lookup(p, line)
        if p.indirect and isinstance(value, str) and not p.index:
            p = replace(p, name=value, indirect=False)
            value = self._lookup(p, line)
        elif p.indirect:
            value = Unknown(f"${{!{p.name}}} at {self.at(line)} names no variable")
        if isinstance(value, Unknown):
            raise CannotTell(value.why)
        empty = value is None or (value == "" and p.operator.startswith(":")) or value == []
        match p.operator.removeprefix(":"):
            case "+":
                if not empty and p.argument is not None:
                    yield from self._pieces(p.argument)
                return
            case "-" | "=" if empty:
                if p.operator.endswith("=") and p.argument is not None:
                    self.assign(p.name, self.scalar(p.argument))
                if p.argument is not None:
                    yield from self._pieces(p.argument)
                return
            case "?" if empty:
                value = self._placeholder(p, line)
            case "length":
                yield str(len(value or "")), p.quoted
                return
            case "#" | "##" | "%" | "%%":
                trimmed = _trim(value if isinstance(value, str) else "", p.operator, self.scalar(p.argument))
                yield trimmed, p.quoted
                return
        if value is None:
            value = self._unset(p, line)
        if isinstance(value, str):
            yield value, p.quoted
        elif p.index == "*" and p.quoted:
            separator = self.variables.get("IFS", " ")
            yield (separator[:1] if isinstance(separator, str) else " ").join(value), True
        else:
            for position, item in enumerate(value):
                if position:
                    yield None
                yield item, p.quoted

    def _lookup(self, p: Parameter, line: int) -> Value | None:
        if p.name in ("@", "*"):
            return self.positional
        if p.name.isdigit() or p.name == "#":
            if isinstance(self.positional, Unknown):
                return self.positional
            if p.name == "#":
                return str(len(self.positional))
            place = int(p.name)
            return self.file if place == 0 else next(iter(self.positional[place - 1 : place]), None)
        if p.name == "BASH_SOURCE":
            return self.file
        if p.name in ("?", "!", "$", "-", "RANDOM", "SECONDS", "LINENO"):
            return Unknown(f"${p.name} at {self.at(line)} is only known in a run")
        if p.name == "PWD":
            return self.directory
        value = self.variables.get(p.name)
        if isinstance(value, Unknown) or value is None:
            return value
        if p.index in ("@", "*"):
            return value if isinstance(value, list) else [value]
        if p.index == "" and isinstance(value, list):
            return value[0] if value else None
        if p.index and not p.index.isdigit():
            return Unknown(f"${{{p.name}[{p.index}]}} at {self.at(line)} is not followed")
        items = value if isinstance(value, list) else [value]
        return next(iter(items[int(p.index or 0) :]), None)

    def _placeholder(self, p: Parameter, line: int) -> str:
        """A required variable that is not set: its name in brackets stands for it."""
        self.notes.append(f"{self.at(line)}: {p.name} is required and not set; <{p.name}> stands for it in this plan")
        return f"<{p.name}>"

    def _unset(self, p: Parameter, line: int) -> Value:
        if p.index in ("@", "*") or p.name in ("@", "*"):
            return []
        if self.nounset:
            return self._placeholder(p, line)
        self.notes.append(f"{self.at(line)}: {p.name} is not set and expands to nothing, as in bash")
        return ""

    def calculate(self, text: Word, line: int) -> int:
        """The value of an arithmetic expression, assignments included. Raises CannotTell."""
        source = self.scalar(text).strip()
        if match := _STEP.fullmatch(source):
            name, sign = match["a"] or match["b"], match["after"] or match["before"]
            old = self._number(name, line)
            new = old + (1 if sign == "++" else -1)
            self.assign(name, str(new))
            return old if match["after"] else new
        if match := _SET.fullmatch(source):
            value = self._evaluate(match["value"], line)
            if match["sign"]:
                value = self._evaluate(f"{self._number(match['name'], line)} {match['sign']} ({value})", line)
            self.assign(match["name"], str(value))
            return value
        return self._evaluate(source or "0", line)

    def _evaluate(self, source: str, line: int) -> int:
        if "#" in source:  # 16#ff, which Python would take for 16 and a comment
            raise CannotTell(f"the arithmetic {_short(source)} at {self.at(line)} is not followed")
        python = re.sub(r"!(?!=)", " not ", source.replace("&&", " and ").replace("||", " or "))
        try:
            return int(self._node(ast.parse(python.strip(), mode="eval").body, line))
        except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError, ZeroDivisionError) as error:
            raise CannotTell(f"the arithmetic {_short(source)} at {self.at(line)} cannot be evaluated") from error

    def _node(self, node: ast.expr, line: int) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return self._number(name, line)
            case ast.BinOp(left, op, right):
                return _wrapped(_BINARY[type(op)](self._node(left, line), self._node(right, line)))
            case ast.UnaryOp(op, operand):
                value = self._node(operand, line)
                return {ast.USub: -value, ast.UAdd: value, ast.Not: int(not value), ast.Invert: ~value}[type(op)]
            case ast.Compare(left, [op], [right]) if type(op) in _COMPARE:
                return int(_COMPARE[type(op)](self._node(left, line), self._node(right, line)))
            case ast.BoolOp(op, values):
                truths = [self._node(value, line) != 0 for value in values]
                return int(all(truths) if isinstance(op, ast.And) else any(truths))
        raise TypeError(f"not arithmetic: {ast.dump(node)}")

    def _number(self, name: str, line: int) -> int:
        value = self.variables.get(name)
        if isinstance(value, Unknown):
            raise CannotTell(value.why)
        text = (value[0] if value else "") if isinstance(value, list) else value or ""
        return self._evaluate(text, line) if text.strip() else 0

    def test(self, words: tuple[Word, ...]) -> bool:
        """`[ ... ]` and `[[ ... ]]` on texts and numbers. Raises CannotTell for tests of files and commands."""
        double = words[0].literal == "[["
        expand = (lambda w: [self.scalar(w)]) if double else self.fields
        fields = [field for word in words[1:] for field in expand(word)]
        if words[0].literal != "test":
            fields = fields[:-1]
        for sign, combine in (("||", any), ("&&", all)):
            if double and sign in fields:
                place = fields.index(sign)
                return combine([self._test(fields[:place], True), self._test(fields[place + 1 :], True)])
        return self._test(fields, double)

    def _test(self, fields: list[str], double: bool) -> bool:
        if double and ("&&" in fields or "||" in fields or "(" in fields):
            raise CannotTell(f"the test {' '.join(fields)} is not followed")
        match fields:
            case []:
                return False
            case ["!", *rest]:
                return not self._test(rest, double)
            case [text]:
                return text != ""
            case ["-n", text]:
                return text != ""
            case ["-z", text]:
                return text == ""
            case [left, "=" | "==" | "!=" as sign, right]:
                equal = fnmatch.fnmatchcase(left, right) if double else left == right
                return equal == (sign != "!=")
            case [left, sign, right] if sign in _NUMBER_TESTS and _is_integer(left) and _is_integer(right):
                return _NUMBER_TESTS[sign](int(left), int(right))
        raise CannotTell(f"the test {' '.join(fields)} is only known in a run")

    def _output(self, script: Script, source: str, line: int) -> str:
        """What a command substitution prints. Raises CannotTell for commands whose output this reader cannot know."""
        outside, variables = self.directory, dict(self.variables)
        lines = []
        try:
            for statement in script:
                for command in (
                    [statement.first, *(s for _, s in statement.rest)] if isinstance(statement, AndOr) else [statement]
                ):
                    lines += self._command_output(command)
        except CannotTell as error:
            why = f"the output of {_short(source)} at {self.at(line)} is only known in a run"
            raise CannotTell(error.why if error.why else why) from error
        finally:
            self.directory, self.variables = outside, variables
        return "\n".join(lines)

    def _command_output(self, command: object) -> list[str]:
        if not isinstance(command, Simple):
            raise CannotTell("")
        for assignment in command.assignments:
            self.assign(assignment.name, self.value_of(assignment))
        fields = [field for word in command.words for field in self.fields(word)]
        match [field for field in fields if field != "--"]:
            case []:
                return []
            case ["cd", place]:
                self.directory = os.path.normpath(os.path.join(self.directory, place))
                return []
            case ["pwd", *_]:
                return [self.directory]
            case ["dirname", path]:
                return [os.path.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else ".")]
            case ["basename", path]:
                return [os.path.basename(path.rstrip("/"))]
            case ["echo", *words] if not (words and words[0].startswith("-")):
                return [" ".join(words)]
            case ["seq", *bounds] if 1 <= len(bounds) <= 3 and all(_is_integer(bound) for bound in bounds):
                numbers = [int(bound) for bound in bounds]
                first, step, last = {1: (1, 1), 2: (numbers[0], 1), 3: tuple(numbers[:2])}[len(numbers)] + (
                    numbers[-1],
                )
                if step and abs(last - first) // abs(step) < LONGEST:
                    return [str(n) for n in range(first, last + (1 if step > 0 else -1), step)]
        raise CannotTell("")


def _trim(value: str, sign: str, pattern: str) -> str:
    """`${value#pattern}` and its kin."""
    cuts = range(len(value) + 1)
    if sign in ("#", "##"):
        for cut in cuts if sign == "#" else reversed(cuts):
            if fnmatch.fnmatchcase(value[:cut], pattern):
                return value[cut:]
    else:
        for cut in reversed(cuts) if sign == "%" else cuts:
            if fnmatch.fnmatchcase(value[cut:], pattern):
                return value[:cut]
    return value


def _wrapped(value: int) -> int:
    """As bash's signed 64-bit numbers wrap around."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"\s*[-+]?\d+\s*", text) is not None


def _short(source: str) -> str:
    text = " ".join(source.split())
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"
