"""Model facts: a Hugging Face config.json -> Megatron's model arguments, one table of rows a family.

`megatron_args` is what `--hf-checkpoint` implies and what `scripts/models/*.sh` hold. Knows nothing of parsers.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from slime.utils.model_facts import deepseek, dense, glm, moe, qwen_next
from slime.utils.model_facts.config import Config, ConfigError, UnknownModelType, language_model, load_config
from slime.utils.model_facts.facts import Family, Value
from slime.utils.model_facts.script import KNOBS, ORDER, to_script, to_tokens

FAMILIES: dict[str, Family] = {
    **dense.FAMILIES,
    **moe.FAMILIES,
    **glm.FAMILIES,
    **deepseek.FAMILIES,
    **qwen_next.FAMILIES,
}

# How a model is trained rather than what it is: a command line may differ from these without contradicting the
# checkpoint. --spec counts among them: it names code.
RECIPE_FLAGS = frozenset(
    {fact.flag for family in FAMILIES.values() for fact in family.facts if fact.recipe} | {"--spec"}
)

__all__ = [
    "KNOBS",
    "RECIPE_FLAGS",
    "ConfigError",
    "UnknownModelType",
    "Value",
    "load_config",
    "megatron_args",
    "supported_model_types",
    "to_script",
    "to_tokens",
]


def supported_model_types() -> tuple[str, ...]:
    """Every model_type that has a table, sorted."""
    return tuple(sorted(FAMILIES))


def megatron_args(
    config: Mapping[str, Any], *, source: str = "config.json", multimodal: bool = False
) -> dict[str, Value]:
    """Megatron's model arguments for a checkpoint: flag (with its dashes) -> value, in the order a script shows them.

    A switch has the value True; --spec a pair of words. config: the content of config.json as it is in the file; of a
    composite model the language model is described, with `multimodal` under the --spec of the whole. source: the
    file's name in messages. Raises UnknownModelType, or ConfigError for a field that is missing, contradictory, or
    beyond what is trained here.
    """
    model = language_model(config, source)
    family = _family(model)
    for rule in family.rules:
        rule.check(model)
    found = {fact.flag: value for fact in family.facts if (value := fact.of(model)) is not None and value is not False}
    if multimodal:
        if family.multimodal_spec is None:
            raise ConfigError(f"{source}: {model.model_type} has no multimodal model here")
        found["--spec"] = family.multimodal_spec
    return {flag: found[flag] for flag in sorted(found, key=ORDER.__getitem__)}


def _family(config: Config) -> Family:
    name = config.model_type
    # MiniMax-M2 was first published under its predecessor's model_type; that one is another architecture.
    if name == "minimax" and "MiniMaxM2ForCausalLM" in (config.fields.get("architectures") or ()):
        name = "minimax_m2"
    if name in FAMILIES:
        return FAMILIES[name]
    near = difflib.get_close_matches(name, FAMILIES, n=3, cutoff=0.5)
    known = [*near, *(other for other in supported_model_types() if other not in near)]
    if not name:
        raise UnknownModelType(f"{config.source}: model_type is missing; known: {', '.join(known)}")
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UnknownModelType(f"{config.source}: model_type {name} is unknown; {hint}known: {', '.join(known)}")
