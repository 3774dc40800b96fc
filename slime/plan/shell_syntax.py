"""The part of bash that launch scripts are written in, as a syntax tree. Reads text alone: nothing is expanded or run.

A construct that is legal bash but not modelled here becomes a node whose value `launch_script.py` cannot know.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Literal characters."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Parameter:
    """`$name`, `${name[index]operator argument}`. operator "" or one of :- - := = :? ? :+ + # ## % %% or "length".

    indirect: `${!name...}`, the variable whose name is the value of this one.
    """

    name: str
    quoted: bool
    index: str = ""
    operator: str = ""
    argument: "Word | None" = None
    indirect: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """`$(( text ))`."""

    text: "Word"
    quoted: bool


@dataclass(frozen=True)
class Substitution:
    """`$( script )`."""

    script: "Script"
    source: str
    quoted: bool


@dataclass(frozen=True)
class Unsupported:
    """Something this reader does not model, as it stands in the file."""

    source: str
    quoted: bool = False


Part = Text | Parameter | Arithmetic | Substitution | Unsupported


@dataclass(frozen=True)
class Word:
    """One word of a command, unexpanded."""

    parts: tuple[Part, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The text of a word without quotes and expansions, else None."""
        plain = all(isinstance(part, Text) and not part.quoted for part in self.parts)
        return "".join(part.text for part in self.parts) if plain and self.parts else None


@dataclass(frozen=True)
class Assignment:
    """`name=word`, `name+=word`, `name=(words)`. indexed: `name[i]=word`, which is not modelled."""

    name: str
    value: Word | tuple[Word, ...]
    append: bool
    indexed: bool
    line: int


@dataclass(frozen=True)
class Simple:
    """Assignments, or a command with its words; redirections are left out."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class AndOr:
    """`first && a || b ...`."""

    first: "Statement"
    rest: tuple[tuple[str, "Statement"], ...]


@dataclass(frozen=True)
class Negation:
    """`! statement`."""

    statement: "Statement"


@dataclass(frozen=True)
class If:
    """branches: (condition, body) of if and every elif; the condition of else is None."""

    branches: tuple[tuple["Script | None", "Script"], ...]


@dataclass(frozen=True)
class For:
    """`for name in words; do body; done`."""

    name: str
    words: tuple[Word, ...]
    body: "Script"


@dataclass(frozen=True)
class Calculation:
    """`(( text ))`, true unless the result is 0."""

    text: Word
    line: int


@dataclass(frozen=True)
class CountingFor:
    """`for (( start; condition; step )); do body; done`."""

    start: Word
    condition: Word
    step: Word
    body: "Script"


@dataclass(frozen=True)
class Blocks:
    """Scripts of which it is not known which run, or how often: `while` and the branches of `case`."""

    bodies: tuple["Script", ...]


@dataclass(frozen=True)
class Subshell:
    """Scripts whose assignments stay inside: `( )`, the parts of a pipeline, a job in the background."""

    bodies: tuple["Script", ...]


@dataclass(frozen=True)
class Group:
    """`{ }`."""

    body: "Script"


@dataclass(frozen=True)
class Function:
    """`name() body`."""

    name: str
    body: "Script"


Statement = Simple | Calculation | AndOr | Negation | If | For | CountingFor | Blocks | Subshell | Group | Function
Script = tuple[Statement, ...]


class ShellSyntaxError(ValueError):
    """Text that this reader cannot divide into commands; `line` says where."""

    def __init__(self, line: int, says: str):
        super().__init__(says)
        self.line = line
