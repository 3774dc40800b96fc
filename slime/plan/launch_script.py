"""Reads the training command out of a launch script without running anything: the tokens bash would pass to train.py.

Follows assignments, arrays, sourced files, functions and conditions that can be decided from the text. What only a run
can tell (the output of a command, a file test) stays unknown; it is an error only if the training command needs it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.plan.shell_expansion import CannotTell, Expansion, Unknown, Value
from slime.plan.shell_parser import parse_script
from slime.plan.shell_syntax import (
    AndOr,
    Assignment,
    Blocks,
    Calculation,
    CountingFor,
    For,
    Function,
    Group,
    If,
    Negation,
    Script,
    ShellSyntaxError,
    Simple,
    Statement,
    Subshell,
    Word,
)

ENTRIES = ("train.py", "train_async.py")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
LOOP_LIMIT = 100_000
CALL_DEPTH = 40


@dataclass(frozen=True)
class LaunchCommand:
    """A command that starts training. tokens: its arguments after the program; where: file:line."""

    program: str
    tokens: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class LaunchScript:
    """What a script starts, in order, and what a reader of the plan should know about how it was read."""

    commands: tuple[LaunchCommand, ...]
    notes: tuple[str, ...]


class LaunchScriptError(ValueError):
    """A script that cannot be read, with file:line."""


class _Exit(Exception):
    """`exit` was reached."""


class _Return(Exception):
    """`return` was reached."""


def read_launch_script(
    path: Path,
    *,
    environ: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> LaunchScript:
    """Read `path` as bash would run it in `directory` (the current one by default).

    environ: variables that exist when it starts. settings: variables that keep their value, whatever the script does.
    Raises LaunchScriptError when there is no training command, or when one depends on something only a run can tell.
    """
    reader = _Reader(dict(environ or {}), dict(settings or {}), str(directory or Path.cwd()))
    try:
        reader.run_file(str(path), Path(reader.shell.directory, path))
    except _Exit:
        pass
    except RecursionError as error:
        raise LaunchScriptError(f"{path}: files source one another, or commands are nested, too deeply") from error
    if not reader.commands:
        raise LaunchScriptError(f"{path}: found no command that starts {' or '.join(ENTRIES)}")
    return LaunchScript(tuple(reader.commands), tuple(dict.fromkeys(reader.notes)))


class _Reader:
    """Walks the syntax tree with the variables that bash would have."""

    def __init__(self, environ: dict[str, Value], settings: dict[str, str], directory: str):
        self.shell = Expansion(environ, settings, directory)
        self.commands: list[LaunchCommand] = []
        self.functions: dict[str, tuple[str, Script]] = {}
        self.locals: list[dict[str, Value | None]] = []
        self.certain = True

    @property
    def notes(self) -> list[str]:
        return self.shell.notes

    def run_file(self, name: str, path: Path) -> None:
        try:
            script = parse_script(path.read_text(encoding="utf-8"))
        except ShellSyntaxError as error:
            raise LaunchScriptError(f"{name}:{error.line}: {error}") from error
        except OSError as error:
            raise LaunchScriptError(f"cannot read {name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise LaunchScriptError(f"cannot read {name}: it is no text") from error
        caller, self.shell.file = self.shell.file, name
        try:
            self.run(script)
        except _Return:
            pass  # `return` ends a sourced file
        finally:
            self.shell.file = caller

    def run(self, script: Script) -> bool | None:
        """Run all statements; the last one's success, None where only a run can tell."""
        status: bool | None = True
        for statement in script:
            status = self.statement(statement)
        return status

    def statement(self, statement: Statement) -> bool | None:
        match statement:
            case Simple():
                return self.simple(statement)
            case Calculation(text, line):
                return self.decide(lambda: self.shell.calculate(text, line) != 0)
            case AndOr():
                return self.and_or(statement)
            case Negation(inner):
                status = self.statement(inner)
                return None if status is None else not status
            case If(branches):
                return self.if_(branches)
            case For():
                return self.for_(statement)
            case CountingFor():
                return self.counting_for(statement)
            case Blocks(bodies):
                for _ in range(2):  # the second time with the effects of the first
                    self.maybe([lambda body=body: self.run(body) for body in bodies])
                return None
            case Subshell(bodies):
                for body in bodies:
                    self.isolated(lambda body=body: self.run(body))
                return None
            case Group(body):
                return self.run(body)
            case Function(name, body):
                self.functions[name] = (self.shell.file, body)
                return True

    def decide(self, question: Callable[[], bool]) -> bool | None:
        try:
            return question()
        except CannotTell:
            return None

    def and_or(self, statement: AndOr) -> bool | None:
        status = self.statement(statement.first)
        for operator, following in statement.rest:
            if status is None:
                self.maybe([lambda following=following: self.statement(following)])
            elif status == (operator == "&&"):
                status = self.statement(following)
        return status

    def if_(self, branches: Sequence[tuple[Script | None, Script]]) -> bool | None:
        for index, (condition, body) in enumerate(branches):
            status = True if condition is None else self.run(condition)
            if status:
                return self.run(body)
            if status is None:
                rest = [body] + [(condition or ()) + body for condition, body in branches[index + 1 :]]
                self.maybe([lambda body=body: self.run(body) for body in rest])
                return None
        return True

    def for_(self, loop: For) -> bool | None:
        try:
            values = [field for word in loop.words for field in self.shell.fields(word)]
        except CannotTell as error:
            self.shell.assign(loop.name, Unknown(error.why))
            return self.statement(Blocks((loop.body,)))
        for value in values:
            self.shell.assign(loop.name, value)
            self.run(loop.body)
        return True

    def counting_for(self, loop: CountingFor) -> bool | None:
        try:
            self.shell.calculate(loop.start, loop.start.line)
            for _ in range(LOOP_LIMIT):
                if loop.condition.parts and not self.shell.calculate(loop.condition, loop.condition.line):
                    return True
                self.run(loop.body)
                self.shell.calculate(loop.step, loop.step.line)
        except CannotTell:
            return self.statement(Blocks((loop.body,)))
        raise LaunchScriptError(f"{self.shell.at(loop.start.line)}: this loop does not end in {LOOP_LIMIT} rounds")

    def maybe(self, branches: Sequence[Callable[[], object]]) -> None:
        """Run each branch on its own; what any of them changes is unknown afterwards."""
        changed: set[str] = set()
        for branch in branches:
            self.isolated(branch, changed)
        for name in changed:
            self.shell.assign(name, Unknown(f"{name} is set under a condition that only a run can decide"))

    def isolated(self, branch: Callable[[], object], changed: set[str] | None = None) -> None:
        """Run without effect on the variables; collect the names of those it would have changed."""
        variables, directory, certain = dict(self.shell.variables), self.shell.directory, self.certain
        self.certain = False
        try:
            branch()
        except (_Exit, _Return):
            pass  # in the other case the script goes on
        finally:
            after = self.shell.variables
            if changed is not None:
                changed |= {name for name in after.keys() | variables.keys() if after.get(name) != variables.get(name)}
            self.shell.variables, self.shell.directory, self.certain = variables, directory, certain

    def simple(self, command: Simple) -> bool | None:
        if not command.words:
            return all([self.assign(assignment) for assignment in command.assignments]) or None
        if command.assignments and command.words[0].literal not in DECLARING:
            return self.with_assignments(command)
        words = list(self.expanded(command.words))
        if (start := self._program(words)) is not None:
            self._launch(command.words, start)
            return None
        name = words[0][0] if isinstance(words[0], list) and words[0] else ""
        if name in DECLARING:
            return self.declare(name, command, words)
        if name in ("[", "[[", "test"):
            return self.decide(lambda: self.shell.test(command.words))
        builtin = getattr(self, f"do_{ {'.': 'source', ':': 'true'}.get(name, name) }", None)
        if builtin is not None:
            return builtin(command, words)
        if name in self.functions:
            return self.call(name, words[1:])
        return None

    def with_assignments(self, command: Simple) -> bool | None:
        """`NAME=value command`: the values hold while the command runs, as in a file that it sources."""
        names = {assignment.name for assignment in command.assignments}
        before = {name: self.shell.variables.get(name) for name in names}
        for assignment in command.assignments:
            self.assign(assignment)
        try:
            return self.simple(Simple((), command.words, command.line))
        finally:
            self.restore(before)

    def restore(self, values: dict[str, Value | None]) -> None:
        for name, value in values.items():
            if value is None:
                self.shell.variables.pop(name, None)
            else:
                self.shell.variables[name] = value

    def expanded(self, words: Sequence[Word]) -> Iterator[list[str] | Unknown]:
        for word in words:
            try:
                yield self.shell.fields(word)
            except CannotTell as error:
                yield Unknown(error.why)

    def assign(self, assignment: Assignment) -> bool:
        """Whether the value is known."""
        try:
            if assignment.indexed:
                raise CannotTell(f"{assignment.name}[...] is assigned at {self.shell.at(assignment.line)}")
            self.shell.assign(assignment.name, self.shell.value_of(assignment))
        except CannotTell as error:
            self.shell.assign(assignment.name, Unknown(error.why))
            return False
        return True

    def declare(self, name: str, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        fields = [field for word in words[1:] if isinstance(word, list) for field in word]
        names = [a.name for a in command.assignments] + [f.partition("=")[0] for f in fields if not f.startswith("-")]
        if name == "local" and self.locals:
            for local in names:
                self.locals[-1].setdefault(local, self.shell.variables.get(local))
        for field in fields:
            key, equals, value = field.partition("=")
            if equals:
                self.shell.assign(key, value)
            elif name == "local" and not field.startswith("-"):
                self.shell.variables.pop(key, None)
        for assignment in command.assignments:
            self.assign(assignment)
        return True

    def call(self, name: str, arguments: Sequence[list[str] | Unknown]) -> bool | None:
        if len(self.locals) >= CALL_DEPTH:
            raise LaunchScriptError(f"{self.shell.file}: {name} calls itself too often")
        unknown = next((word for word in arguments if isinstance(word, Unknown)), None)
        outer, file = self.shell.positional, self.shell.file
        self.shell.positional = unknown or [field for word in arguments for field in word]
        self.shell.file, body = self.functions[name]
        self.locals.append({})
        try:
            return self.run(body)
        except _Return:
            return None
        finally:
            self.shell.positional, self.shell.file = outer, file
            self.restore(self.locals.pop())

    def _program(self, words: Sequence[list[str] | Unknown]) -> tuple[int, int] | None:
        """(word, field) of the training program in a command, None if the command does not start one."""
        before: str | Unknown | None = None
        for index, word in enumerate(words):
            if isinstance(word, Unknown):
                before = word
                continue
            for position, field in enumerate(word):
                if os.path.basename(field) in ENTRIES and self._starts_programs(before):
                    return index, position
                before = field
        return None

    def _starts_programs(self, before: str | Unknown | None) -> bool:
        """Whether a program may follow this word: nothing, an interpreter, its options, a launching function."""
        if before is None or isinstance(before, Unknown) or before in self.functions or before.startswith("-"):
            return True
        return os.path.basename(before).startswith("python") or before in ("exec", "slime_launch")

    def _launch(self, words: Sequence[Word], start: tuple[int, int]) -> None:
        index, position = start
        where = self.shell.at(words[0].line)
        try:
            first = self.shell.fields(words[index])
            tokens = first[position + 1 :] + [f for word in words[index + 1 :] for f in self.shell.fields(word)]
        except CannotTell as error:
            raise LaunchScriptError(
                f"{where}: the training command is not known without a run: {error.why}"
            ) from error
        self.commands.append(LaunchCommand(first[position], tuple(tokens), where))
        if not self.certain:
            self.notes.append(f"{where}: runs only under a condition; it is planned as if it does")

    # builtins: do_NAME(command, expanded words) -> success

    def do_source(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        where = self.shell.at(command.line)
        if len(words) < 2 or isinstance(words[1], Unknown) or not words[1]:
            why = words[1].why if len(words) > 1 and isinstance(words[1], Unknown) else "no file is named"
            raise LaunchScriptError(f"{where}: it is not known which file is sourced here: {why}")
        name = words[1][0]
        path = Path(self.shell.directory, name)
        if not path.is_file() and not self.certain:
            self.notes.append(f"{where}: {name} is not there and is left out")
            return None
        if not path.is_file():
            raise LaunchScriptError(f"{where}: sources {name}, which is not there")
        self.run_file(name, path)
        return None

    def do_set(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        for word in words[1:]:
            for option in word if isinstance(word, list) else ():
                if option.startswith("-") and not option.startswith("--") and "u" in option:
                    self.shell.nounset = True
                elif option == "nounset":
                    self.shell.nounset = True
        return True

    def do_cd(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        places = [field for word in words[1:] if isinstance(word, list) for field in word if field != "--"]
        if any(isinstance(word, Unknown) for word in words) or not places:
            return None
        self.shell.directory = os.path.normpath(os.path.join(self.shell.directory, places[0]))
        return True

    def do_unset(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        for word in words[1:]:
            for name in word if isinstance(word, list) else ():
                self.shell.variables.pop(name, None)
        return True

    def do_printf(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        fields = [field for word in words if isinstance(word, list) for field in word]
        if len(fields) < 3 or fields[1] != "-v":
            return True
        unknown = next((word.why for word in words if isinstance(word, Unknown)), None)
        pattern, *values = fields[3:] or [""]
        if unknown is None and pattern.count("%") == pattern.count("%s") == len(values) and "\\" not in pattern:
            self.shell.assign(fields[2], pattern % tuple(values))
        else:
            why = unknown or f"`printf` formats it at {self.shell.at(command.line)}"
            self.shell.assign(fields[2], Unknown(why))
        return True

    def do_read(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        where = self.shell.at(command.line)
        for word in words[1:]:
            for name in word if isinstance(word, list) else ():
                if name.isidentifier():
                    self.shell.assign(name, Unknown(f"{name} is read from elsewhere at {where}"))
        return None

    do_mapfile = do_readarray = do_getopts = do_read

    def do_eval(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        self.notes.append(f"{self.shell.at(command.line)}: `eval` is not followed")
        return None

    def do_shift(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        if isinstance(self.shell.positional, list):
            self.shell.positional = self.shell.positional[1:]
        return True

    def do_exit(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        raise _Exit

    def do_return(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        raise _Return

    def do_true(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        return True

    def do_false(self, command: Simple, words: Sequence[list[str] | Unknown]) -> bool | None:
        return False
