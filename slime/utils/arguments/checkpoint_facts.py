"""What the checkpoint's config.json says about the model becomes arguments; the command line may override it.

Facts are read as if they had been typed before everything else. Which families exist is known to
`slime.utils.model_facts`; which differences can be meant is decided here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.utils.arguments.flag import Flag, Problem
from slime.utils.arguments.hf_config import is_hf_checkpoint, language_model
from slime.utils.arguments.parser import CommandLine, Grammar, unique
from slime.utils.layout.errors import LayoutError
from slime.utils.layout.moe_layers import moe_layer_pattern
from slime.utils.model_facts import RECIPE_FLAGS, ConfigError, UnknownModelType, load_config, megatron_args, to_tokens
from slime.utils.model_facts.script import ORDER

# Families that this version can train; the others can be planned.
TRAINABLE = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "llama",
    "mimo",
    "minimax_m2",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)

# Megatron attributes in which the trainer's model cannot differ from the checkpoint's: they decide the shapes of its
# weights, and the engines, which read config.json, would otherwise hold another model. Others may differ: a run may
# stretch the rotary base, for example.
MUST_AGREE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "swiglu",
    "normalization",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
)


@dataclass(frozen=True)
class CheckpointFacts:
    """config.json as the command line sees it.

    model_type: its own word for the family. hf_config: the part that describes the language model. Both None without
    a config.json. values: Megatron attribute -> value that config.json gives it, {} when the family is unknown.
    """

    model_type: str | None
    hf_config: dict[str, Any] | None
    values: dict[str, Any]


def apply_checkpoint_facts(
    command_line: CommandLine, grammar: Grammar, dry_run: bool = False
) -> tuple[CommandLine, CheckpointFacts, list[str]]:
    """The command line completed by the model facts of --hf-checkpoint, the facts, and where the two differ.

    A difference reads `rotary-base: config 1000000, command line 10000`. In a dry run --plan-hf-config stands in for a
    checkpoint that is not here. Raises nothing: what is wrong with config.json is added to the problems.
    """
    values, trains = command_line.values, not command_line.values["debug_rollout_only"]
    flag, path = _described_by(values, dry_run)
    try:
        config, source = load_config(Path(path)) if path else (None, "")
    except ConfigError as error:
        return _with_problems(command_line, [Problem((flag,), str(error))]), CheckpointFacts(None, None, {}), []
    if config is None:
        return command_line, CheckpointFacts(None, None, {}), []
    facts = CheckpointFacts(config.get("model_type"), language_model(config), {})
    try:
        stated = grammar.read(to_tokens(megatron_args(config, source=source)))
    except (ValueError, LayoutError) as error:
        return _with_problems(command_line, [_problem(error, flag)] if trains else []), facts, []
    facts = replace(facts, values={dest: stated.values[dest] for dest in stated.given})
    problems = (_untrainable(facts, values, flag) or stated.problems) if trains else []
    completed = _complete(command_line, stated, grammar)
    return _with_problems(completed, problems), facts, _differences(command_line, facts.values, grammar)


def _described_by(values: Mapping[str, Any], dry_run: bool) -> tuple[str, str | None]:
    """(flag, path) of the config.json that describes the model; the path is None where there is none."""
    if is_hf_checkpoint(values["hf_checkpoint"]):
        return "--hf-checkpoint", values["hf_checkpoint"]
    return "--plan-hf-config", values["plan_hf_config"] if dry_run else None


def _problem(error: ValueError, flag: str) -> Problem:
    if isinstance(error, LayoutError):
        return Problem(error.flags, error.says, error.try_)
    return Problem((flag,), str(error), kind="unsupported" if isinstance(error, UnknownModelType) else "rule")


def _untrainable(facts: CheckpointFacts, values: Mapping[str, Any], flag: str) -> list[Problem]:
    """The problem of a family whose layers or weight names this version lacks, unless the user brings the model."""
    if facts.model_type in TRAINABLE or values["custom_model_provider_path"]:
        return []
    says = f"config.json has model_type {facts.model_type}, which is not supported yet; this version trains "
    return [Problem((flag,), says + ", ".join(TRAINABLE), kind="unsupported")]


def _complete(command_line: CommandLine, stated: CommandLine, grammar: Grammar) -> CommandLine:
    """Fill in what the user left open. For Megatron's parser the facts come first, so that the user's words win."""
    values, first = dict(command_line.values), []
    for dest in stated.given:
        if dest in command_line.given:
            continue
        values[dest] = stated.values[dest]
        first += grammar.megatron_tokens(grammar.by_dest[dest], values[dest])
    return replace(command_line, values=values, megatron_argv=[*first, *command_line.megatron_argv])


def _differences(command_line: CommandLine, facts: Mapping[str, Any], grammar: Grammar) -> list[str]:
    lines = []
    for option in ORDER:  # of a recipe config.json says nothing, so nothing differs from it
        flag = grammar.options[option]
        dest = flag.dest
        if option in RECIPE_FLAGS or dest not in command_line.given:
            continue
        theirs, mine = facts.get(dest, flag.default), command_line.values[dest]
        if not same_fact(dest, theirs, mine, command_line.values["num_layers"] or facts.get("num_layers")):
            lines.append(f"{flag.name[2:]}: config {_shown(flag, theirs)}, command line {_shown(flag, mine)}")
    return lines


def same_fact(dest: str, fact: Any, value: Any, num_layers: int | None) -> bool:
    """Whether two values of a Megatron attribute mean the same; num_layers gives a layer pattern its length."""
    if fact == value:
        return True
    if dest == "moe_layer_freq" and num_layers:
        try:
            return moe_layer_pattern(fact, num_layers) == moe_layer_pattern(value, num_layers)
        except LayoutError:
            return False
    numbers = isinstance(fact, int | float) and isinstance(value, int | float)
    return numbers and math.isclose(fact, value, rel_tol=1e-9)


def _shown(flag: Flag, value: Any) -> str:
    if flag.kind == "off":  # named after what it takes away: `--disable-bias-linear` is on when the value is False
        value = not value
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _with_problems(command_line: CommandLine, problems: list[Problem]) -> CommandLine:
    return replace(command_line, problems=unique([*command_line.problems, *problems]))
