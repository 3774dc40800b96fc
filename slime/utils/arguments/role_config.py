"""`--megatron-config-path`: a YAML file with settings that hold for one training role alone.

megatron:
  - name: policy
    role: actor
    overrides: {lr: 2e-6, clip_grad: 0.5}
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from slime.utils.arguments.config_file import apply_values, read_yaml
from slime.utils.arguments.flag import Flag, Problem
from slime.utils.arguments.parser import CommandLine, Grammar

FLAG = "--megatron-config-path"
ROLES = ("actor", "critic")
ENTRY_KEYS = ("name", "role", "overrides", "args")  # args is another word for overrides
PLACEMENT = ("num_nodes", "num_gpus_per_node")  # roles share their GPUs; older files state them all the same
GROUPS = ("algorithm", "train", "megatron_extra")
BATCHES = (
    "use_dynamic_batch_size",
    "max_tokens_per_gpu",
    "log_probs_max_tokens_per_gpu",
    "balance_data",
    "balance_by_flops",
)


def apply_role_config(path: str, command_line: CommandLine, grammar: Grammar) -> CommandLine:
    """The command line with the actor's overrides on top; they win over the command line and --custom-config-path.

    Raises nothing: what is wrong with the file is added to the problems, a critic's entry among it.
    """
    try:
        content = read_yaml(path)
        entries = list(_entries(content, path))
        _check_roles(entries, path)
        overrides = {entry["role"]: _overrides(entry, path) for entry in entries}
    except ValueError as error:
        return replace(command_line, problems=[*command_line.problems, Problem((FLAG,), str(error))])
    problems, notices = [], []
    if "critic" in overrides:
        says = f"{path} has an entry for the critic, which is not supported yet by this version of slime"
        problems.append(Problem((FLAG,), says, kind="unsupported"))
    values = dict(overrides.get("actor", {}))
    for key in PLACEMENT:
        if key in values:
            notices.append(f"{path}: {key} has no effect: roles share the GPUs that the command line gives the actor")
            del values[key]
    known = _settings_of_a_role(grammar)
    for key in [key for key in values if key.replace("-", "_") not in known]:
        problems.append(Problem((f"{path}: {key}",), "is no setting of a training role" + _near(key, known)))
        del values[key]
    applied = apply_values(values, path, command_line, grammar)
    return replace(applied, problems=[*applied.problems, *problems], notices=[*applied.notices, *notices])


def _entries(content: Any, path: str) -> Iterator[dict[str, Any]]:
    """The file's entries. Raises ValueError when the file or an entry has another form."""
    if not isinstance(content, dict) or set(content) != {"megatron"} or not isinstance(content["megatron"], list):
        found = f", found {', '.join(map(str, content))}" if isinstance(content, dict) else ""
        raise ValueError(f"{path} must hold one key, `megatron`, with a list of roles{found}")
    for number, entry in enumerate(content["megatron"], 1):
        where = f"{path}: entry {number}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} must hold {', '.join(ENTRY_KEYS[:3])}")
        for key in entry:
            if key not in ENTRY_KEYS:
                raise ValueError(f"{where} has an unknown key {key!r}{_near(str(key), ENTRY_KEYS)}")
        if entry.get("role") not in ROLES:
            raise ValueError(f"{where} has role {entry.get('role')!r}, must be {' or '.join(ROLES)}")
        yield entry


def _check_roles(entries: Iterable[dict[str, Any]], path: str) -> None:
    roles = [entry["role"] for entry in entries]
    for role in ROLES:
        if roles.count(role) > 1:
            raise ValueError(f"{path} has {roles.count(role)} entries for the {role}, at most 1 is possible")


def _overrides(entry: dict[str, Any], path: str) -> dict[str, Any]:
    if "overrides" in entry and "args" in entry:
        raise ValueError(f"{path}: the {entry['role']} has both overrides and args, which mean the same")
    overrides = entry.get("overrides", entry.get("args")) or {}
    if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
        raise ValueError(f"{path}: the overrides of the {entry['role']} must be `name: value` lines")
    return overrides


def _settings_of_a_role(grammar: Grammar) -> dict[str, Flag]:
    """Attributes that the trainers read: Megatron's, and slime's own for training."""
    flags = [flag for group in grammar.groups if group.name in GROUPS for flag in group.flags]
    flags += [grammar.by_dest[dest] for dest in BATCHES]
    flags += [flag for flag in grammar.by_dest.values() if flag.name in grammar.megatron_options]
    return {flag.dest: flag for flag in flags}


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.replace("-", "_"), list(known), n=3, cutoff=0.6)
    return f"; the nearest known: {', '.join(near)}" if near else ""
