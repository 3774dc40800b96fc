"""Equality in value of two arithmetic expressions written by a model, without running anything they contain.

Grammar: numbers, single letters, + - * / ^ !, brackets, implicit products, sqrt(x), root(n, x), ln(x), pi. Both sides
are evaluated with 300 digits at random complex values of the letters; expressions that agree there are equal.
Everything is bounded: length, nesting, factorials and the size of every intermediate value.
"""

import random
import re
from collections.abc import Callable
from typing import Any

from mpmath import MPContext

MAX_LENGTH = 300  # characters
MAX_DEPTH = 40  # nested brackets, signs and exponents
MAX_LETTERS = 2
MAX_FACTORIAL = 60
DIGITS = 300
MAX_LOG10 = 100  # of any intermediate value
TOLERANCE_LOG10 = -280  # relative to the largest intermediate value
POINTS = 4

_TOKEN = re.compile(r"\d+(?:\.\d*)?|\.\d+|sqrt|root|ln|pi|[a-z]|[-+*/^!(),]")
_WORDS = ("sqrt", "root", "ln", "pi")
# Towers and long exponents are compared as text only, as the public graders do.
_REFUSED = re.compile(r"\^\(|\^[0-9]+\^|\^[0-9][0-9]+")


class ExpressionError(ValueError):
    """The text is no expression of the grammar, or goes beyond a bound."""


def equal_in_value(left: str, right: str) -> bool:
    """Whether two lower-case expressions without spaces have the same value. False if either cannot be evaluated."""
    try:
        tokens = [_tokens(left), _tokens(right)]
        letters = sorted({token for side in tokens for token in side if token.isalpha() and token not in _WORDS})
        if len(letters) > MAX_LETTERS:
            return False
        context = MPContext()
        context.dps = DIGITS
        draw = random.Random(0)
        for _ in range(POINTS if letters else 1):
            values = {x: context.mpc(draw.uniform(-2, 2), draw.uniform(0.1, 2)) for x in letters}
            sides = [_Evaluation(side, values, context) for side in tokens]
            difference = abs(sides[0].value - sides[1].value)
            scale = max(sides[0].largest, sides[1].largest)
            if difference > scale * context.mpf(10) ** TOLERANCE_LOG10:
                return False
    except ExpressionError:
        return False
    return True


def _tokens(text: str) -> list[str]:
    if not text or len(text) > MAX_LENGTH or _REFUSED.search(text):
        raise ExpressionError(f"empty, longer than {MAX_LENGTH} characters, or an exponent that is not a single digit")
    tokens = _TOKEN.findall(text)
    if sum(map(len, tokens)) != len(text):
        raise ExpressionError(f"characters outside the grammar in {text[:80]!r}")
    return tokens


class _Evaluation:
    """Recursive descent over the tokens, computing as it reads. `value`: the result; `largest`: max |intermediate|."""

    def __init__(self, tokens: list[str], letters: dict[str, Any], context: MPContext):
        self._tokens, self._position, self._depth = [*tokens, ""], 0, 0
        self._letters, self._context = letters, context
        self.largest = context.mpf(1)
        self._bound = context.mpf(10) ** MAX_LOG10
        self.value = self._sum()
        if self._next:
            raise ExpressionError(f"{self._next!r} cannot stand here")

    @property
    def _next(self) -> str:
        return self._tokens[self._position]

    def _take(self, *expected: str) -> str:
        token = self._next
        if expected and token not in expected:
            raise ExpressionError(f"expected {' or '.join(expected)}, found {token!r}")
        self._position += 1
        return token

    def _bounded(self, compute: Callable[[], Any]) -> Any:
        try:
            value = compute()
        except (ZeroDivisionError, OverflowError, ValueError) as error:  # ValueError: mpmath at a pole
            raise ExpressionError(str(error)) from error
        size = abs(value)
        if not size < self._bound:
            raise ExpressionError(f"an intermediate value is beyond 1e{MAX_LOG10}")
        self.largest = max(self.largest, size)
        return value

    def _nested(self, rule: Callable[[], Any]) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        value = rule()
        self._depth -= 1
        return value

    def _sum(self) -> Any:
        value = self._product()
        while self._next in ("+", "-"):
            operator, other = self._take(), self._product()
            value = self._bounded(lambda a=value, b=other, plus=operator == "+": a + b if plus else a - b)
        return value

    def _product(self) -> Any:
        value = self._signed()
        while self._next in ("*", "/") or self._starts_atom():
            operator = self._take() if self._next in ("*", "/") else "*"
            other = self._signed()
            value = self._bounded(lambda a=value, b=other, times=operator == "*": a * b if times else a / b)
        return value

    def _signed(self) -> Any:
        if self._next in ("+", "-"):
            sign = -1 if self._take() == "-" else 1
            return sign * self._nested(self._signed)
        return self._power()

    def _power(self) -> Any:
        value = self._atom()
        while self._next == "!":
            self._take()
            value = self._bounded(lambda n=value: self._factorial(n))
        if self._next == "^":
            self._take()
            exponent = self._nested(self._signed)
            value = self._bounded(lambda: self._context.power(value, exponent))
        return value

    def _factorial(self, n: Any) -> Any:
        if n.imag != 0 or n.real != int(n.real) or not 0 <= n.real <= MAX_FACTORIAL:
            raise ExpressionError(f"! needs an integer in 0..{MAX_FACTORIAL}")
        return self._context.factorial(n)

    def _starts_atom(self) -> bool:
        return self._next == "(" or self._next[:1].isalnum() or self._next[:1] == "."

    def _atom(self) -> Any:
        token = self._take()
        if token == "(":
            value = self._nested(self._sum)
            self._take(")")
            return value
        if token == "pi":
            return self._context.pi + 0
        if token in ("sqrt", "ln"):
            argument = self._nested(self._atom)
            function = self._context.sqrt if token == "sqrt" else self._context.log
            return self._bounded(lambda: function(argument))
        if token == "root":
            self._take("(")
            degree = self._nested(self._sum)
            self._take(",")
            argument = self._nested(self._sum)
            self._take(")")
            return self._bounded(lambda: self._context.power(argument, 1 / degree))
        if token in self._letters:
            return self._letters[token]
        if token[:1].isdigit() or token[:1] == ".":
            return self._bounded(lambda: self._context.mpf(token))
        raise ExpressionError(f"{token!r} cannot stand here" if token else "the expression ends too early")
