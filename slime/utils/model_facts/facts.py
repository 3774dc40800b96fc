"""The rows that describe a model family: a Megatron flag and where its value comes from in config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.model_facts.config import Config

Value = bool | int | float | str | tuple[str, str]  # True: a switch; a pair: the two words of --spec


@dataclass(frozen=True)
class Fact:
    """One flag. of(config) is its value; None or False leaves the flag out.

    recipe: how such a model is trained (kernels, dispatch, router losses), which no config states: a command line that
    says otherwise contradicts nothing.
    """

    flag: str
    of: Callable[[Config], Value | None]
    recipe: bool = False


@dataclass(frozen=True)
class Rule:
    """A field that, when stated, must have one value (of a list: in every entry): nothing else is computed here."""

    key: str
    value: Any
    why: str

    def check(self, config: Config) -> None:
        """Raises ConfigError when the field is stated and has another value."""
        found = config.fields.get(self.key)
        entries = found if isinstance(found, list) else [] if found is None else [found]
        for entry in entries:
            if entry != self.value:
                says = f"{'has' if entries is found else 'is'} {entry!r}, must be {self.value!r} to be trained here"
                raise config.error(self.key, f"{says}: {self.why}")


@dataclass(frozen=True)
class Family:
    """The rows of a model type. multimodal_spec: the --spec of the whole model with its vision tower."""

    facts: tuple[Fact, ...]
    rules: tuple[Rule, ...] = ()
    multimodal_spec: tuple[str, str] | None = None


def field(flag: str, key: str, kind: type = int) -> Fact:
    """The value of a field that the config must state."""
    return Fact(flag, lambda config: config.need(key, kind))


def maybe(flag: str, key: str, kind: type = int) -> Fact:
    """The value of a field where it is stated and not 0."""
    return Fact(flag, lambda config: config.get(key, kind) or None)


def made(flag: str, of: Callable[[Config], Value | None]) -> Fact:
    """A value computed from several fields."""
    return Fact(flag, of)


def always(flag: str, value: Value = True) -> Fact:
    """What every model of the family has."""
    return Fact(flag, lambda config: value)


def recipe(flag: str, value: Value = True) -> Fact:
    """How models of the family are trained; not a property of the checkpoint."""
    return Fact(flag, lambda config: value, recipe=True)
