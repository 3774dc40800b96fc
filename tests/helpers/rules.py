"""A rule of the command line as data: tokens that break it, words of the message, tokens that keep it; and its test.

The command line around the tokens is the `case` fixture's small one, or, with `model`, that of a real checkpoint's
config.json on many GPUs, which then describes the model alone.
"""

import json
import re
import shlex
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from slime.utils.arguments.checks.common import Check
from slime.utils.arguments.flag import Problem
from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.reading import read_args
from slime.utils.arguments.upstream import load_tables
from tests.helpers.model_configs import config_of

MANY_GPUS = {
    "--accelerator": "cuda",
    "--actor-num-nodes": "32",
    "--actor-num-gpus-per-node": "8",
    "--rollout-num-gpus": "256",
    "--rollout-num-gpus-per-engine": "8",
    "--colocate": None,
    "--use-dynamic-batch-size": None,
    "--max-tokens-per-gpu": "8192",
    "--bf16": None,
    "--n-samples-per-prompt": "64",
    "--global-batch-size": "512",
}


@dataclass(frozen=True)
class Rule:
    """broken breaks the rule with one problem that holds all `words`; kept, in its place, does not break any.

    also: tokens of both. config: changes to config.json (None takes a key away), kept_config: further ones for kept.
    others: whether further problems of the same kind may come along.
    """

    broken: str
    words: tuple[str, ...]
    kept: str = ""
    also: str = ""
    model: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    kept_config: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    kind: str = "rule"
    others: bool = False


Rules = Mapping[Check, tuple[Rule, ...]]


def each_rule(rules: Rules) -> list[tuple[Check, Rule]]:
    """The pairs to parametrize a test with."""
    return [(check, rule) for check, group in rules.items() for rule in group]


def rule_name(value: Any) -> str:
    """What pytest calls a case."""
    return value.broken or "-".join(value.words) if isinstance(value, Rule) else value.__name__


def check_rule(case: Any, check: Check, rule: Rule) -> None:
    """Broken: this check objects, once, in these words, and its advice settles it. Kept: nobody objects."""
    places = {"hf": case.hf, "data": case.directory / "train.jsonl", "dir": case.directory}
    broken = _tokens(case, rule, rule.broken, {}, places)
    args, problems = _read(broken)
    said = [problem for problem in problems if problem.kind == rule.kind]
    own = [problem for problem in check(args, given(broken)) if problem.kind == rule.kind]
    text = "\n".join(map(str, said)) or "nobody objects"
    assert own and all(problem in said for problem in own), f"{check.__name__} does not object: {text}"
    assert rule.others or len(said) == 1, text
    problem = next((problem for problem in own if all(word in str(problem) for word in rule.words)), None)
    assert problem is not None, f"{rule.words} are not all in: {own[0]}"
    _check_advice(broken, problem, problems, check if rule.others else None)
    _, problems = _read(_tokens(case, rule, rule.kept, rule.kept_config, places))
    assert not [str(problem) for problem in problems if problem.kind == rule.kind]


def rule_arguments(case: Any, rule: Rule) -> tuple[Namespace, Namespace]:
    """The arguments of the broken and of the kept command line, whatever is said against them."""
    places = {"hf": case.hf, "data": case.directory / "train.jsonl", "dir": case.directory}
    broken, _ = _read(_tokens(case, rule, rule.broken, {}, places))
    kept, _ = _read(_tokens(case, rule, rule.kept, rule.kept_config, places))
    return broken, kept


def _check_advice(broken: list[str], problem: Problem, before: list[Problem], check: Check | None) -> None:
    """Where the advice is tokens, following it settles this problem and makes no other; with `check`, none of its."""
    advice = re.split(r",? or |, ", problem.try_)[0].strip()
    if not advice.startswith("--") or "|" in advice or any(word.isupper() for word in advice.split()):
        return
    argv = [*broken, *shlex.split(advice)]
    args, after = _read(argv)
    after = after if check is None else list(check(args, given(argv)))
    others = [other for other in before if other != problem]
    left = [str(other) for other in after if other.kind == "rule" and other not in others]
    assert not left, f"{advice} does not help: {left}"


def _tokens(case: Any, rule: Rule, tokens: str, config: Mapping[str, Any], places: Mapping[str, Any]) -> list[str]:
    changes = {**rule.config, **config}
    if not rule.model:
        case.write_config(**{key: value for key, value in changes.items() if value is not None})
        flags = {flag: value for flag, value in case.flags.items() if flag not in rule.without}
    else:
        content = {**config_of(rule.model), **changes}
        text = json.dumps({key: value for key, value in content.items() if key not in changes or value is not None})
        (case.hf / "config.json").write_text(text)
        flags = {flag: case.flags[flag] for flag in ("--hf-checkpoint", "--prompt-data", "--num-rollout")}
        flags |= {"--rollout-batch-size": "8", "--rollout-max-response-len": "16", **MANY_GPUS}
        flags = {flag: value for flag, value in flags.items() if flag not in rule.without}
    base = [token for flag, value in flags.items() for token in ((flag,) if value is None else (flag, value))]
    return [*base, *(word.format(**places) for word in shlex.split(f"{rule.also} {tokens}"))]


def given(argv: list[str]) -> dict[str, str]:
    """What the user set, by attribute."""
    return _grammar().read(argv).given


def _read(argv: list[str]) -> tuple[Namespace, list[Problem]]:
    reading = read_args(argv, environ={})
    return reading.args, reading.problems


@cache
def _grammar() -> Grammar:
    return Grammar(load_tables())
