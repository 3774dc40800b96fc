"""`--megatron-config-path`: a YAML file with settings that hold for one training role alone; and what makes a critic.

megatron:
  - name: policy
    role: actor
    overrides: {lr: 2e-6, clip_grad: 0.5}
  - name: value
    role: critic
    overrides: {lr: 1e-5, load: checkpoints/critic}
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.utils.arguments.config_file import apply_values, read_yaml
from slime.utils.arguments.flag import Flag, Problem
from slime.utils.arguments.hf_config import TRACKER, is_megatron_checkpoint, megatron_checkpoint
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
# Rank r of the critic hands its values to rank r of the actor, sample by sample: both cut a rollout up alike.
SHARED = (
    *BATCHES,
    *("micro_batch_size", "global_batch_size", "num_critic_only_steps", "advantage_estimator"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "use_tp_pp_dp_mapping"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "allgather_cp"),
    "microbatch_group_size_per_vp_stage",
)
# What a critic is, whatever the actor's settings are: it fits values to rewards, and knows nobody's log-probs.
CRITIC: Mapping[str, Any] = {
    "loss_type": "value_loss",
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "ref_update_interval": None,
    "use_opd": False,
    "normalize_advantages": False,
    "untie_embeddings_and_output_weights": True,
    "mtp_num_layers": None,
    "mtp_use_repeated_layer": False,
    "enable_mtp_training": False,
    "save_hf": None,
    "save_debug_train_data": None,
    "rollout_data_postprocess_path": None,
    "custom_megatron_before_log_prob_hook_path": None,
}
DIRECTORY = "critic"  # below --save and --load


def role_command_lines(command_line: CommandLine, grammar: Grammar) -> tuple[CommandLine, CommandLine]:
    """(the actor's command line, the critic's), each with its overrides on top of the given one.

    Overrides win over the command line and --custom-config-path; the actor's of what both share hold for the critic.
    The critic's checkpoints are below the actor's, unless its overrides say where. Raises nothing: what is wrong with
    the file is added to the actor's problems, what is wrong with the critic's settings to the critic's.
    """
    path = command_line.values["megatron_config_path"]
    overrides: dict[str, dict[str, Any]] = {}
    if path:
        try:
            entries = list(_entries(read_yaml(path), path))
            _check_roles(entries, path)
            overrides = {entry["role"]: _overrides(entry, path) for entry in entries}
        except ValueError as error:
            problems = [*command_line.problems, Problem((FLAG,), str(error))]
            command_line = replace(command_line, problems=problems)
    actor = _apply(overrides.get("actor", {}), path, command_line, grammar)
    mine = overrides.get("critic", {})
    if mine and actor.values["advantage_estimator"] != "ppo":
        why = f"--advantage-estimator {actor.values['advantage_estimator']} trains no critic"
        actor = replace(actor, notices=[*actor.notices, f"{path}: the critic's entry has no effect: {why}"])
    shared = {k: v for k, v in overrides.get("actor", {}).items() if k.replace("-", "_") in SHARED}
    return actor, _critic(mine, path, _apply(shared, path, command_line, grammar), grammar)


def critic_args(values: Mapping[str, Any], given: Mapping[str, str], path: str | None) -> dict[str, Any]:
    """What to replace in the completed arguments `values` of the critic's command line: `CRITIC`, the custom advantage
    function unless the critic's own overrides name one, and a layout of stages that has prediction layers (m)."""
    custom, layout = "custom_advantage_function_path", "pipeline_model_parallel_layout"
    own = path is not None and given.get(custom, "").startswith(f"{path}: ")
    stages = values[layout] and re.sub(r"m(\*\d+)?", "", values[layout])
    return {**CRITIC, custom: values[custom] if own else None, layout: stages}


def _critic(
    overrides: Mapping[str, Any], path: str | None, command_line: CommandLine, grammar: Grammar
) -> CommandLine:
    problems, legal = [], {}
    for key, value in overrides.items():
        dest = key.replace("-", "_")
        if dest in SHARED:
            says = "holds for both roles, which cut a rollout up alike; set it on the command line"
            problems.append(Problem((f"{path}: {key}",), says))
        elif dest in CRITIC:
            problems.append(Problem((f"{path}: {key}",), f"is {CRITIC[dest]} for every critic"))
        else:
            legal[key] = value
    own = {key.replace("-", "_") for key in legal}
    values, save, load = dict(command_line.values), command_line.values["save"], command_line.values["load"]
    notices = list(command_line.notices)
    if "save" not in own and save is not None:
        values["save"] = str(Path(save) / DIRECTORY)
    elif isinstance(legal.get("save"), str) and save and Path(legal["save"]).absolute() == Path(save).absolute():
        says = f"is {save} for both roles, whose checkpoints have the same names"
        problems.append(Problem((f"{path}: save",), says, f"save: {Path(save) / DIRECTORY}"))
    if "load" not in own and load is not None:
        started, problem, notice = _start(load, values)
        values |= started
        problems += [problem] if problem else []
        notices += [notice] if notice else []
    line = replace(command_line, values=values, notices=notices)
    applied = _apply(legal, path, line, grammar)
    return replace(applied, problems=[*applied.problems, *problems])


def _start(load: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], Problem | None, str]:
    """(values of the critic that follow from the actor's --load, a problem or None, a notice or "").

    The actor's checkpoint decides which one is resumed: the critic's is saved before it, and may be one ahead. Before
    the actor has trained, only the critic has one. Beside an actor's checkpoint without a critic's, the critic starts
    from the actor's weights. With --finetune nothing is resumed: the critic's newest weights do as well.
    """
    found = megatron_checkpoint(load)
    own = (Path(load) if found is None else found[0]) / DIRECTORY
    if not is_megatron_checkpoint(str(own)):
        if found is None:
            return {}, None, ""
        notice = f"{own} holds no critic: it starts from the weights of {load} and with a new value head"
        return {"finetune": True, "no_load_optim": True, "no_load_rng": True}, None, notice
    newest = (own / TRACKER).read_text().strip()
    step = values["ckpt_step"]
    if step is None and found is not None:
        step = found[1] if found[1] is not None else (found[0] / TRACKER).read_text().strip()
    there = str(step).isdecimal() and (own / f"iter_{int(step):07d}").is_dir()
    if step is None or str(step) == newest or (values["finetune"] and not there):
        return {"load": str(own), "ckpt_step": None}, None, ""
    if not there:
        says = f"the actor's checkpoint is {step}, and {own} has none of that step (its newest: {newest})"
        hint = "--ckpt-step STEP with a step that both have, or --finetune to start both from their weights"
        return {"load": str(own)}, Problem(("--load",), says, hint), ""
    return {"load": str(own), "ckpt_step": int(step)}, None, ""


def _apply(values: Mapping[str, Any], path: str | None, command_line: CommandLine, grammar: Grammar) -> CommandLine:
    """The command line with one role's overrides on top."""
    if not values:
        return command_line
    values, problems, notices = dict(values), [], []
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
