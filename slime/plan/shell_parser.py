"""Divides a bash file into the nodes of `shell_syntax.py`; expands and runs nothing."""

import re

from slime.plan.shell_syntax import (
    AndOr,
    Arithmetic,
    Assignment,
    Blocks,
    Calculation,
    CountingFor,
    For,
    Function,
    Group,
    If,
    Negation,
    Parameter,
    Part,
    Script,
    ShellSyntaxError,
    Simple,
    Statement,
    Subshell,
    Substitution,
    Text,
    Unsupported,
    Word,
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]=]*\])?(\+?)=")
_FUNCTION = re.compile(r"([A-Za-z_][A-Za-z0-9_:-]*)[ \t]*\([ \t]*\)")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:<<<|<<-?|<>|>>|>&|<&|>\||&>>|&>|<|>)")
_SPECIAL = re.compile(r"[@*#?$!-]|\d")
_OPERATOR = re.compile(r":[-=?+]|[-=?+]|##?|%%?")
_RESERVED = re.compile(r"[a-z]+(?=[\s;&|()]|$)|[{}!](?=[\s;&|()]|$)|\(\(|\(")
_BRACES_TO_EXPAND = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_END_OF_WORD = " \t\n;&|()<>"


def parse_script(text: str) -> Script:
    """The commands of a bash file. Raises ShellSyntaxError."""
    parser = _Parser(text)
    script = parser.script(())
    if parser.pos < len(text):
        raise parser.error(f"unexpected {text[parser.pos : parser.pos + 10]!r}")
    return script


class _Parser:
    """Recursive descent over the characters; `pos` is the next one to read."""

    def __init__(self, text: str, first_line: int = 1):
        self.text, self.pos, self.first_line = text, 0, first_line
        self.heredocs: list[tuple[str, bool]] = []

    @property
    def line(self) -> int:
        return self.first_line + self.text.count("\n", 0, self.pos)

    def error(self, says: str) -> ShellSyntaxError:
        return ShellSyntaxError(self.line, says)

    def at(self, token: str) -> bool:
        return self.text.startswith(token, self.pos)

    def expect(self, token: str) -> None:
        if not self.at(token):
            found = self.text[self.pos : self.pos + 10] or "the end of the file"
            raise self.error(f"expected {token!r}, found {found!r}")
        self.pos += len(token)

    def blank(self, newlines: bool = False) -> None:
        """Skip blanks, continued lines and comments, with `newlines` empty lines too."""
        while self.pos < len(self.text):
            if self.at("\\\n"):
                self.pos += 2
            elif self.text[self.pos] in " \t":
                self.pos += 1
            elif self.at("#") and (self.pos == 0 or self.text[self.pos - 1] in _END_OF_WORD):
                end = self.text.find("\n", self.pos)
                self.pos = len(self.text) if end < 0 else end
            elif newlines and self.at("\n"):
                self.newline()
            else:
                return

    def newline(self) -> None:
        self.pos += 1
        for delimiter, indented in self.heredocs:
            while self.pos < len(self.text):
                end = self.text.find("\n", self.pos)
                end = len(self.text) if end < 0 else end
                content = self.text[self.pos : end]
                self.pos = min(end + 1, len(self.text))
                if (content.lstrip("\t") if indented else content) == delimiter:
                    break
            else:
                raise self.error(f"the text that ends with {delimiter} does not end")
        self.heredocs.clear()

    def keyword(self) -> str:
        """The unquoted name or sign at `pos` that may be a reserved word."""
        match = _RESERVED.match(self.text, self.pos)
        return match[0] if match else ""

    def script(self, stops: tuple[str, ...]) -> Script:
        """Statements until a reserved word of `stops`, a closing parenthesis or the end of the text."""
        statements: list[Statement] = []
        while True:
            self.blank(newlines=True)
            if self.pos >= len(self.text) or self.at(")") or self.keyword() in stops or self.at(";;"):
                return tuple(statements)
            statement = self.and_or()
            self.blank()
            if self.at("&") and not self.at("&&"):
                self.pos += 1
                statement = Subshell(((statement,),))
            elif self.at(";") and not self.at(";;"):
                self.pos += 1
            statements.append(statement)

    def and_or(self) -> Statement:
        first, rest = self.pipeline(), []
        while True:
            self.blank()
            operator = next((sign for sign in ("&&", "||") if self.at(sign)), None)
            if operator is None:
                return AndOr(first, tuple(rest)) if rest else first
            self.pos += 2
            self.blank(newlines=True)
            rest.append((operator, self.pipeline()))

    def pipeline(self) -> Statement:
        if self.keyword() == "!":
            self.pos += 1
            self.blank()
            return Negation(self.pipeline())
        commands = [self.command()]
        self.blank()
        while self.at("|") and not self.at("||"):
            self.pos += 2 if self.at("|&") else 1
            self.blank(newlines=True)
            commands.append(self.command())
            self.blank()
        return commands[0] if len(commands) == 1 else Subshell(tuple((command,) for command in commands))

    def command(self) -> Statement:
        match self.keyword():
            case "if":
                statement = self.if_()
            case "for" | "select":
                statement = self.for_()
            case "while" | "until" as word:
                self.pos += len(word)
                condition = self.script(("do",))
                statement = Blocks((condition + self.do_done(),))
            case "case":
                statement = self.case()
            case "{":
                self.pos += 1
                statement = Group(self.script(("}",)))
                self.expect("}")
            case "((":
                line = self.line
                self.pos += 2
                statement = Calculation(self.arithmetic(self.balanced("))")), line)
            case "(":
                self.pos += 1
                statement = Subshell((self.script(()),))
                self.expect(")")
            case "function":
                self.pos += len("function")
                self.blank()
                statement = self.function(self.word().literal or "")
            case _:
                if match := _FUNCTION.match(self.text, self.pos):
                    self.pos = match.end()
                    return self.function(match[1])
                return self.simple()
        self.redirections()
        return statement

    def function(self, name: str) -> Function:
        if match := re.compile(r"\s*\(\s*\)").match(self.text, self.pos):
            self.pos = match.end()
        self.blank(newlines=True)
        return Function(name, (self.command(),))

    def if_(self) -> If:
        self.pos += len("if")
        branches = []
        condition: Script | None = self.script(("then",))
        while True:
            if condition is not None:
                self.expect("then")
            body = self.script(("elif", "else", "fi"))
            branches.append((condition, body))
            word = self.keyword()
            self.pos += len(word)
            if word == "fi":
                return If(tuple(branches))
            if word not in ("elif", "else"):
                raise self.error("this `if` has no `fi`")
            condition = self.script(("then",)) if word == "elif" else None

    def for_(self) -> Statement:
        self.pos += len(self.keyword())
        self.blank()
        if self.at("(("):
            self.pos += 2
            clauses = self.balanced("))").split(";")
            if len(clauses) != 3:
                raise self.error("a counting `for` has three clauses")
            self.blank()
            if self.at(";"):
                self.pos += 1
            return CountingFor(*map(self.arithmetic, clauses), self.do_done())
        name, words = self.word().literal or "", []
        self.blank(newlines=True)
        if self.keyword() == "in":
            self.pos += len("in")
            while True:
                self.blank()
                if self.pos >= len(self.text) or self.text[self.pos] in ";\n":
                    break
                words.append(self.word())
        if self.at(";"):
            self.pos += 1
        return For(name, tuple(words), self.do_done())

    def do_done(self) -> Script:
        self.blank(newlines=True)
        self.expect("do")
        body = self.script(("done",))
        self.expect("done")
        return body

    def case(self) -> Blocks:
        self.pos += len("case")
        self.blank()
        self.word()
        self.blank(newlines=True)
        self.expect("in")
        bodies = []
        while True:
            self.blank(newlines=True)
            if self.keyword() == "esac":
                self.pos += len("esac")
                return Blocks(tuple(bodies))
            closing = self.text.find(")", self.pos + 1)
            if closing < 0:
                raise self.error("this `case` has no `esac`")
            self.pos = closing + 1
            bodies.append(self.script(("esac",)))
            self.blank(newlines=True)
            while self.pos < len(self.text) and self.text[self.pos] in ";&":
                self.pos += 1

    def simple(self) -> Simple:
        line, assignments, words = self.line, [], []
        while True:
            self.blank()
            if self.redirections():
                continue
            if self.pos >= len(self.text) or self.text[self.pos] in "\n;&|)":
                break
            if self.at("("):
                raise self.error("unexpected '('")
            declares = bool(words) and words[0].literal in _DECLARING
            if (not words or declares) and (match := _ASSIGNMENT.match(self.text, self.pos)):
                self.pos = match.end()
                value = self.array() if self.at("(") else self.word(may_be_empty=True)
                assignments.append(Assignment(match[1], value, bool(match[3]), bool(match[2]), line))
                continue
            words.append(self.word())
            if words[0].literal == "[[" and len(words) == 1:
                words += self.until_brackets_close()
        return Simple(tuple(assignments), tuple(words), line)

    def array(self) -> tuple[Word, ...]:
        self.expect("(")
        words = []
        while True:
            self.blank(newlines=True)
            if self.at(")"):
                self.pos += 1
                return tuple(words)
            if self.pos >= len(self.text):
                raise self.error("this array has no closing parenthesis")
            if self.text[self.pos] in ";&|<>(":
                raise self.error(f"unexpected {self.text[self.pos]!r} in an array")
            words.append(self.word())

    def until_brackets_close(self) -> list[Word]:
        words = []
        while True:
            self.blank(newlines=True)
            sign = re.compile(r"&&|\|\||[()<>]").match(self.text, self.pos)
            if sign:
                self.pos = sign.end()
                words.append(Word((Text(sign[0], False),), self.line))
            elif self.pos >= len(self.text):
                raise self.error("this `[[` has no `]]`")
            else:
                after_match = words and words[-1].literal == "=~"
                words.append(self.word(stop=" \t\n" if after_match else _END_OF_WORD))
            if words[-1].literal == "]]":
                return words

    def redirections(self) -> bool:
        """Skip redirections at `pos`; whether there were any."""
        found = False
        while True:
            self.blank()
            match = _REDIRECTION.match(self.text, self.pos)
            if not match or self.text.startswith(("<(", ">("), self.pos):
                return found
            found, sign = True, match[0].lstrip("0123456789")
            self.pos = match.end()
            self.blank()
            word = self.word()
            if sign in ("<<", "<<-"):
                self.heredocs.append(
                    ("".join(part.text for part in word.parts if isinstance(part, Text)), "-" in sign)
                )

    def word(self, stop: str = _END_OF_WORD, may_be_empty: bool = False) -> Word:
        """The word at `pos`, up to an unquoted character of `stop`."""
        line, start = self.line, self.pos
        if self.text.startswith(("<(", ">("), start):
            self.pos += 2
            self.balanced(")")
            return Word((Unsupported(self.text[start : self.pos]),), line)
        parts = self.parts(stop, quoted=False)
        if any(isinstance(p, Text) and not p.quoted and _BRACES_TO_EXPAND.search(p.text) for p in parts):
            parts = [Unsupported(self.text[start : self.pos])]
        if self.pos == start and not may_be_empty:
            raise self.error(f"expected a word, found {self.text[start : start + 10]!r}")
        return Word(tuple(parts), line)

    def parts(self, stop: str, quoted: bool) -> list[Part]:
        """What a word, a double-quoted text (quoted) or the argument of `${name:-...}` is made of."""
        parts: list[Part] = []
        while self.pos < len(self.text) and (sign := self.text[self.pos]) not in stop:
            if sign == "\\":
                escaped = self.text[self.pos + 1 : self.pos + 2]
                if quoted and escaped not in ("$", "`", '"', "\\", "\n", "}"):
                    parts.append(Text("\\", True))
                    self.pos += 1
                    continue
                if escaped != "\n":
                    parts.append(Text(escaped, True))
                self.pos += 2
            elif sign == "'" and not quoted:
                closing = self.text.find("'", self.pos + 1)
                if closing < 0:
                    raise self.error("this ' has no partner")
                parts.append(Text(self.text[self.pos + 1 : closing], True))
                self.pos = closing + 1
            elif sign == '"':
                opened, self.pos = self.line, self.pos + 1
                parts += self.parts('"', quoted=True) or [Text("", True)]
                if not self.at('"'):
                    raise ShellSyntaxError(opened, 'this " has no partner')
                self.pos += 1
            elif sign == "$":
                parts.append(self.dollar(quoted))
            elif sign == "`":
                start, self.pos = self.pos, self.pos + 1
                while self.pos < len(self.text) and not self.at("`"):
                    self.pos += 2 if self.at("\\") else 1
                self.expect("`")
                parts.append(Unsupported(self.text[start : self.pos], quoted))
            else:
                if parts and isinstance(parts[-1], Text) and parts[-1].quoted == quoted and not quoted:
                    sign = parts.pop().text + sign
                parts.append(Text(sign, quoted))
                self.pos += 1
        return parts

    def arithmetic(self, text: str) -> Word:
        return Word(tuple(_Parser(text, self.line).parts("", quoted=True)), self.line)

    def dollar(self, quoted: bool) -> Part:
        start = self.pos
        if self.at("$(("):
            self.pos += 3
            return Arithmetic(self.arithmetic(self.balanced("))")), quoted)
        if self.at("$("):
            self.pos += 2
            script = self.script(())
            self.expect(")")
            return Substitution(script, self.text[start : self.pos], quoted)
        if self.at("${"):
            return self.braces(quoted)
        if self.at("$'") and not quoted:
            closing = self.text.find("'", self.pos + 2)
            if closing < 0:
                raise self.error("this $' has no partner")
            content, self.pos = self.text[self.pos + 2 : closing], closing + 1
            return Unsupported(self.text[start : self.pos]) if "\\" in content else Text(content, True)
        match = _NAME.match(self.text, self.pos + 1) or _SPECIAL.match(self.text, self.pos + 1)
        self.pos = match.end() if match else self.pos + 1
        return Parameter(match[0], quoted) if match else Text("$", True)

    def braces(self, quoted: bool) -> Part:
        start = self.pos
        self.pos += 2
        length = self.at("#") and not self.at("#}")
        indirect = self.at("!")
        self.pos += length or indirect
        match = _NAME.match(self.text, self.pos) or _SPECIAL.match(self.text, self.pos)
        if match and (_NAME.fullmatch(match[0]) or not indirect):
            self.pos = match.end()
            index = re.compile(r"\[([^]]*)\]").match(self.text, self.pos)
            self.pos = index.end() if index else self.pos
            operator = "length" if length else ""
            argument = None
            if not length and (found := _OPERATOR.match(self.text, self.pos)):
                self.pos, operator = found.end(), found[0]
                argument = Word(tuple(self.parts("}", quoted)), self.line)
            if self.at("}"):
                self.pos += 1
                return Parameter(match[0], quoted, index[1] if index else "", operator, argument, indirect)
        self.pos = start + 2
        self.balanced("}")
        return Unsupported(self.text[start : self.pos], quoted)

    def balanced(self, closing: str) -> str:
        """The text up to `closing`, which is passed too; brackets of its kind inside come in pairs."""
        opening, start, depth = {")": "(", "))": "(", "}": "{"}[closing], self.pos, 0
        while self.pos < len(self.text):
            if depth == 0 and self.at(closing):
                self.pos += len(closing)
                return self.text[start : self.pos - len(closing)]
            depth += (self.text[self.pos] == opening) - (self.text[self.pos] == closing[0])
            self.pos += 1
        self.pos = start
        raise self.error(f"the closing {closing!r} is missing")
