"""Rules of the model: Megatron's description of it agrees with the Hugging Face checkpoint's."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from slime.utils.arguments.checkpoint_facts import MUST_AGREE, same_fact
from slime.utils.arguments.checks.common import first_of, head_dim, model_config, of_trainer
from slime.utils.arguments.flag import Problem

REQUIRED = {
    "num_layers": ("--num-layers", "num_hidden_layers"),
    "hidden_size": ("--hidden-size", "hidden_size"),
    "num_attention_heads": ("--num-attention-heads", "num_attention_heads"),
}
NO_CONFIG = "a checkpoint with a config.json, a file of scripts/models, or in a dry run --plan-hf-config FILE"
# What config.json calls a fact; the first key that is there.
CONFIG_KEYS = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim", "qk_nope_head_dim"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "moe_layer_freq": ("first_k_dense_replace", "mlp_layer_types", "decoder_sparse_step"),
    "dsa_indexer_n_heads": ("index_n_heads",),
    "dsa_indexer_head_dim": ("index_head_dim",),
}
# Other checks say more about these.
ELSEWHERE = ("moe_router_topk", "moe_shared_expert_intermediate_size", "untie_embeddings_and_output_weights")


@of_trainer
def check_described(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The model is described, by config.json or by the command line."""
    if a.spec is not None or a.custom_model_provider_path is not None:
        return
    for dest, (flag, key) in REQUIRED.items():
        if getattr(a, dest) is None:
            fact = model_config(a).get(key)
            if fact is not None:
                yield Problem((flag,), "is not given", f"{flag} {fact}")
            else:
                yield Problem((flag,), "is not given, and no config.json says it", NO_CONFIG)


@of_trainer
def check_model(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """What decides the shapes of the weights is the same on the command line and in config.json."""
    facts = a.checkpoint_facts
    if not facts:
        return
    for dest in MUST_AGREE:
        if dest not in given or dest in ELSEWHERE:
            continue
        value = getattr(a, dest)
        if dest not in facts:
            yield from _unknown_to_checkpoint(a, dest, value, given[dest])
        elif not same_fact(dest, facts[dest], value, a.num_layers) and not _is_cut(a, dest, facts):
            yield from _contradiction(a, dest, facts[dest], value, given[dest])


def _contradiction(a: Namespace, dest: str, fact: Any, value: Any, flag: str) -> Iterator[Problem]:
    if isinstance(fact, bool):
        says = f"is {'on' if value else 'off'}, and the checkpoint's model has it {'on' if fact else 'off'}"
        yield Problem((flag,), says, f"leave {flag} out")
        return
    config = model_config(a)
    key = next((key for key in CONFIG_KEYS.get(dest, ()) if config.get(key) is not None), None)
    where = f"{key} in config.json is {config[key]}" if key else f"config.json gives {fact}"
    if key and config[key] != fact and not isinstance(config[key], list):
        where += f", which is {fact}"
    elif key and isinstance(config[key], list):
        where = f"{key} in config.json gives {fact}"
    yield Problem((flag,), f"is {value}, and {where}", f"{flag} {fact}")


def _unknown_to_checkpoint(a: Namespace, dest: str, value: Any, flag: str) -> Iterator[Problem]:
    """A feature that the command line gives the model, and the checkpoint has no weights for."""
    if value is True or (dest in ("num_experts", "q_lora_rank", "dsa_indexer_n_heads") and value):
        says = f"{'' if value is True else f'{value} '}gives the model something that config.json does not describe"
        yield Problem((flag,), says, f"leave {flag} out")


def _is_cut(a: Namespace, dest: str, facts: Mapping[str, Any]) -> bool:
    """Training alone may use the first layers of a checkpoint; engines would still serve all of them."""
    if not a.debug_train_only or not a.num_layers or a.num_layers >= facts.get("num_layers", 0):
        return False
    return dest in ("num_layers", "moe_layer_freq")


@of_trainer
def check_tied(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Word embedding and output layer are one tensor in both descriptions, or two in both."""
    tied, flag = model_config(a).get("tie_word_embeddings"), "--untie-embeddings-and-output-weights"
    if tied is not None and tied == a.untie_embeddings_and_output_weights:
        says = f"config.json has tie_word_embeddings {str(tied).lower()}, the command line "
        says += "has the flag" if tied else "lacks it"
        yield Problem((flag,), says, f"leave {flag} out" if tied else flag)


@of_trainer
def check_dropout(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The policy whose log-probs are compared before, while and after training is one function of its weights."""
    for flag, value in (("--attention-dropout", a.attention_dropout), ("--hidden-dropout", a.hidden_dropout)):
        if value:
            says = f"is {value:g}, must be 0: the pass that computes log-probs and the training step must "
            yield Problem((flag,), says + "see the same policy, and dropout makes it random", f"{flag} 0")


@of_trainer
def check_rotary(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A checkpoint with rotary positions gets them, of a part of each head that is there."""
    config = model_config(a)
    rotary = first_of(config, "rope_theta", "rope_parameters", "rope_scaling") is not None
    kind = "rope" if a.use_rotary_position_embeddings else a.position_embedding_type
    if rotary and kind in ("learned_absolute", "relative") and "position_embedding_type" in given:
        says = f"is {kind}, and config.json describes rotary positions"
        yield Problem(("--position-embedding-type",), says, "--position-embedding-type rope")
    if not 0 < a.rotary_percent <= 1:
        says = f"is {a.rotary_percent:g}, must be within (0, 1]"
        yield Problem(("--rotary-percent",), says, "--rotary-percent 1.0")
    if a.multi_latent_attention and a.rotary_interleaved:
        says = "latent attention has its own order of rotary dimensions; leave it out"
        yield Problem(("--rotary-interleaved",), says)
    width = head_dim(a)
    if width and not a.multi_latent_attention and int(width * a.rotary_percent) % 2:
        rotated = int(width * a.rotary_percent)
        says = f"{a.rotary_percent:g} x {width} (width of a head) = {rotated} dimensions, which do not pair up"
        yield Problem(("--rotary-percent",), says, "--rotary-percent 1.0" if width % 2 == 0 else "")


CHECKS = (check_described, check_model, check_tied, check_dropout, check_rotary)
