"""`--custom-config-path`: a YAML file whose top-level keys set arguments, before anything is derived from them."""

from pathlib import Path
from typing import Any

import yaml

from slime.utils.arguments.flag import Problem
from slime.utils.arguments.parser import CommandLine, Grammar, unsupported


def apply_config_file(path: str, command_line: CommandLine, grammar: Grammar) -> CommandLine:
    """The command line with the file's values on top; keys that no flag knows become attributes for plug-ins.

    A known key takes its flag's type ("1e-4" becomes 1e-4) and counts as given by the user. Keys of SGLang and
    router flags (`sglang_...`, `router_...`) work too. Text that only Megatron can read joins `megatron_argv`.
    Raises nothing: what is wrong is added to the problems.
    """
    problems = list(command_line.problems)
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        return _with(
            command_line, problems=[*problems, Problem(("--custom-config-path",), f"cannot read {path}: {error}")]
        )
    if content is None:
        content = {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        problem = Problem(("--custom-config-path",), f"{path} must hold `name: value` lines at its top level")
        return _with(command_line, problems=[*problems, problem])

    values, given, megatron_argv = (
        dict(command_line.values),
        dict(command_line.given),
        list(command_line.megatron_argv),
    )
    for key, value in content.items():
        dest, where = key.replace("-", "_"), f"{path}: {key}"
        flag = grammar.by_dest.get(dest)
        if flag is not None:
            problems += unsupported(flag, where, value)
            try:
                value = flag.coerce(value)
            except ValueError as error:
                problems.append(Problem((where,), str(error)))
                continue
            if flag.opaque and flag.name in grammar.megatron_options:
                megatron_argv += [flag.name, str(value)]
        values[dest] = value
        given[dest] = where
    return _with(command_line, values=values, given=given, megatron_argv=megatron_argv, problems=problems)


def _with(command_line: CommandLine, **changes: Any) -> CommandLine:
    return CommandLine(**{**command_line.__dict__, **changes})
