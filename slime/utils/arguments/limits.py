"""Values that no run can have: reported, and replaced so that the rest is still checked and planned.

The layout arithmetic makes lists as long as some of them, and nan is neither above nor below the bound of any rule.
"""

import math
import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.utils.arguments.flag import Problem

LAYERS, RANKS, SAMPLES, WIDTH, ANY = 1000, 1 << 17, 1 << 22, (1 << 31) - 1, 1 << 53
PATTERNS = ("only_train_params_name_list", "freeze_params_name_list")
LIMITS = {
    **dict.fromkeys(("num_layers", "mtp_num_layers", "pipeline_model_parallel_size", "sglang_pp_size"), LAYERS),
    **dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"), LAYERS),
    **dict.fromkeys(("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"), LAYERS),
    **dict.fromkeys(("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"), RANKS),
    **dict.fromkeys(("expert_tensor_parallel_size", "actor_num_nodes", "actor_num_gpus_per_node"), RANKS),
    **dict.fromkeys(("rollout_num_gpus", "rollout_num_gpus_per_engine", "num_gpus_per_node"), RANKS),
    **dict.fromkeys(("num_experts", "sglang_dp_size", "sglang_ep_size", "prefill_num_servers"), RANKS),
    **dict.fromkeys(("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "micro_batch_size"), SAMPLES),
    **dict.fromkeys(
        ("hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "vocab_size", "padded_vocab_size"), WIDTH
    ),
    **dict.fromkeys(("num_attention_heads", "num_query_groups", "kv_channels"), WIDTH),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "make_vocab_size_divisible_by"), WIDTH),
}


def replace_impossible(a: Namespace, given: Mapping[str, str], defaults: Mapping[str, Any]) -> list[Problem]:
    """A problem for each number of the draft `a` that is not finite or above its limit, and each broken pattern.

    In their place, in `a`, stands the default (by attribute in `defaults`), or the limit; such a pattern is left out.
    """
    problems = []
    for dest in PATTERNS:
        patterns = getattr(a, dest) or []
        broken = {pattern: error for pattern in patterns if (error := _broken(pattern))}
        option = given.get(dest, "--" + dest.replace("_", "-"))
        for pattern, error in broken.items():
            says = f"{pattern!r} is no regular expression: {error}"
            problems.append(Problem((option,), says, f"{option} '{re.escape(pattern)}'"))
        if broken:
            setattr(a, dest, [pattern for pattern in patterns if pattern not in broken] or None)
    for dest, option in given.items():
        value = getattr(a, dest)
        numbers = value if isinstance(value, list) else [value]
        wrong = [number for number in numbers if isinstance(number, float) and not math.isfinite(number)]
        if wrong:
            problems.append(Problem((option,), f"is {wrong[0]}, must be a finite number"))
            setattr(a, dest, defaults.get(dest))
    for dest, limit in {**dict.fromkeys(given, ANY), **LIMITS}.items():
        value = getattr(a, dest)
        if isinstance(value, int) and value > limit:
            option = given.get(dest, "--" + dest.replace("_", "-"))
            problems.append(Problem((option,), f"is {value}, must be at most {limit}"))
            setattr(a, dest, limit)
    nodes, each = a.actor_num_nodes, a.actor_num_gpus_per_node
    if nodes * each > RANKS:
        says = f"{nodes} nodes x --actor-num-gpus-per-node {each} = {nodes * each} GPUs, must be at most {RANKS}"
        problems.append(Problem((given.get("actor_num_nodes", "--actor-num-nodes"),), says))
        a.actor_num_nodes = max(1, RANKS // each)
    return problems


def _broken(pattern: str) -> str | None:
    """What is wrong with a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None
