"""Rules of the model: Megatron's description of it agrees with the Hugging Face checkpoint's."""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from slime.utils.arguments.flag import Problem
from slime.utils.arguments.hf_config import is_moe, read_hf_config, rope_theta

REQUIRED = {
    "num_layers": ("--num-layers", "num_hidden_layers"),
    "hidden_size": ("--hidden-size", "hidden_size"),
    "num_attention_heads": ("--num-attention-heads", "num_attention_heads"),
}
# Key in config.json, Megatron's dest, Megatron's flag.
SAME = (
    ("hidden_size", "hidden_size", "--hidden-size"),
    ("num_attention_heads", "num_attention_heads", "--num-attention-heads"),
    ("num_hidden_layers", "num_layers", "--num-layers"),
    ("moe_intermediate_size", "moe_ffn_hidden_size", "--moe-ffn-hidden-size"),
    (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "--moe-shared-expert-intermediate-size",
    ),
    ("rms_norm_eps", "layernorm_epsilon", "--norm-epsilon"),
)


def check_model(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The model is described, and each fact that both sides state is the same."""
    if a.debug_rollout_only:
        return
    try:
        config = read_hf_config(a.hf_checkpoint) or {}
    except ValueError as error:
        yield Problem(("--hf-checkpoint",), str(error))
        return
    if a.spec is None and a.custom_model_provider_path is None:
        for dest, (flag, key) in REQUIRED.items():
            if getattr(a, dest) is None:
                fact = config.get(key)
                yield Problem((flag,), "is not given", f"{flag} {fact}" if fact is not None else "")
    for key, dest, flag in SAME:
        yield from _compare(key, config.get(key), flag, getattr(a, dest))
    if not _all_layers_have_experts(a, config):
        yield from _compare(
            "intermediate_size", config.get("intermediate_size"), "--ffn-hidden-size", a.ffn_hidden_size
        )
    theta = rope_theta(config)
    yield from _compare("rope_theta", None if theta is None else _whole(theta), "--rotary-base", a.rotary_base)
    tied = config.get("tie_word_embeddings")
    if tied is not None and tied == a.untie_embeddings_and_output_weights:
        flag = "--untie-embeddings-and-output-weights"
        says = f"config.json has tie_word_embeddings {str(tied).lower()}, the command line " + (
            "has the flag" if tied else "lacks it"
        )
        yield Problem((flag,), says, f"leave {flag} out" if tied else flag)


def check_dropout(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The policy whose log-probs are compared before, while and after training is one function of its weights."""
    for flag, value in (("--attention-dropout", a.attention_dropout), ("--hidden-dropout", a.hidden_dropout)):
        if value:
            says = f"is {value:g}, must be 0: the pass that computes log-probs and the training step must "
            yield Problem((flag,), says + "see the same policy, and dropout makes it random", f"{flag} 0")


def _compare(key: str, fact: Any, flag: str, value: Any) -> Iterator[Problem]:
    """A problem when both sides state a number and the numbers differ."""
    if not isinstance(fact, int | float) or not isinstance(value, int | float):
        return
    if not math.isclose(fact, value, rel_tol=1e-9):
        yield Problem((flag,), f"is {value:g}, and {key} in config.json is {fact:g}", f"{flag} {fact}")


def _all_layers_have_experts(a: Namespace, config: Mapping[str, Any]) -> bool:
    """Then intermediate_size describes no layer. moe_layer_freq is Megatron's text: 1, N, or a list expression."""
    if not is_moe(dict(config)):
        return False
    frequency = str(a.moe_layer_freq).replace(" ", "")
    return frequency == "1" or (
        frequency.startswith("[") and "[0]" not in frequency and ",0" not in frequency and "[0" not in frequency
    )


def _whole(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


CHECKS = (check_model, check_dropout)
