"""`--custom-config-path`: a YAML file whose top-level keys set arguments, before anything is derived from them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from slime.utils.arguments.flag import Problem
from slime.utils.arguments.parser import CommandLine, Grammar, deprecations, unsupported


def apply_config_file(path: str, command_line: CommandLine, grammar: Grammar) -> CommandLine:
    """The command line with the file's values on top; keys that no flag knows become attributes for plug-ins.

    Keys of SGLang and router flags (`sglang_...`, `router_...`) work too. Raises nothing: what is wrong is added to
    the problems.
    """
    flag = "--custom-config-path"
    try:
        content = read_yaml(path) or {}
    except ValueError as error:
        return replace(command_line, problems=[*command_line.problems, Problem((flag,), str(error))])
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        problem = Problem((flag,), f"{path} must hold `name: value` lines at its top level")
        return replace(command_line, problems=[*command_line.problems, problem])
    return apply_values(content, path, command_line, grammar)


def read_yaml(path: str) -> Any:
    """The content of a YAML file. Raises ValueError naming the file when it is absent or not YAML."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def apply_values(content: Mapping[str, Any], file: str, command_line: CommandLine, grammar: Grammar) -> CommandLine:
    """The command line with attributes set from a file, which wins.

    A value of a known attribute takes its flag's type ("1e-4" becomes 1e-4) and counts as given by the user. Lists,
    and text that only Megatron can read, join `megatron_argv`; Megatron gets everything else from the attribute.
    """
    values, given = dict(command_line.values), dict(command_line.given)
    problems, notices, megatron_argv = list(command_line.problems), list(command_line.notices), []
    for key, value in content.items():
        dest, where = key.replace("-", "_"), f"{file}: {key}"
        flag = grammar.by_dest.get(dest)
        if flag is not None:
            problems += unsupported(flag, where, value)
            notices += deprecations(flag, where, value)
            try:
                value = flag.coerce(value)
            except ValueError as error:
                problems.append(Problem((where,), str(error)))
                continue
            if flag.opaque or isinstance(value, list):
                megatron_argv += grammar.megatron_tokens(flag, value)
        values[dest] = value
        given[dest] = where
    argv = [*command_line.megatron_argv, *megatron_argv]
    return CommandLine(values, given, argv, problems, notices)
