"""Which weights of a checkpoint are quantised: decided by whole components of module names, never by substrings."""

import re
from collections.abc import Iterable, Sequence

# Linear layers that quantised checkpoints store quantised, by the last component of their module path.
LINEAR = frozenset(
    "q_proj k_proj v_proj qkv_proj o_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj "  # attention
    "wq_b wk "  # the indexer of sparse attention
    "in_proj_qkv in_proj_z in_proj_qkvz out_proj "  # linear attention
    "gate_proj up_proj gate_up_proj down_proj w1 w2 w3".split()  # MLP and experts
)
# Matrices that engines keep in bfloat16 whatever the checkpoint's format: small, or too sensitive.
KEPT = frozenset(
    "embed_tokens word_embeddings lm_head gate router shared_expert_gate eh_proj fc input_proj weights_proj "
    "in_proj_a in_proj_b in_proj_ba conv1d".split()
)
# Parts of a multimodal model beside the language model; not quantised.
TOWERS = frozenset(
    "visual vision_model vision_tower vision_encoder audio_tower mm_projector multi_modal_projector".split()
)
# What engines hold as one matrix, by their name for it: either all parts are quantised or none.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
# In a model with routed experts INT4 is for those alone: they are most of the bytes and bear it best.
ROUTED_EXPERTS_ONLY = (
    "lm_head",
    r"re:.*\.self_attn\..*",
    r"re:.*\.linear_attn\..*",
    r"re:.*\.shared_experts?\..*",
    r"re:.*\.mlp\.(gate|up|gate_up|down)_proj$",
)
_EXPERT = re.compile(r"(^|.*\.)experts\.\d+\.[^.]+$")


def module_of(name: str) -> str | None:
    """ "model.layers.0.mlp.up_proj.weight" -> "model.layers.0.mlp.up_proj"; None for anything but a `.weight`."""
    return name.removesuffix(".weight") if name.endswith(".weight") else None


def is_routed_expert(module: str) -> bool:
    """ "...mlp.experts.7.down_proj" is one, "...mlp.shared_experts.down_proj" is not."""
    return _EXPERT.match(module) is not None


def is_known_linear(module: str) -> bool:
    """A linear layer of the language model whose name we know."""
    components = module.split(".")
    return components[-1] in LINEAR and not TOWERS.intersection(components)


def may_be_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether an engine could hold the tensor quantised: a matrix, and none that always stays in bfloat16."""
    module = module_of(name)
    if module is None or len(shape) != 2:
        return False
    components = module.split(".")
    return components[-1] not in KEPT and not components[-1].endswith("norm") and not TOWERS.intersection(components)


def path_rule_matches(rule: str, module: str) -> bool:
    """The rules of FP8 configs: a run of whole components anywhere in the path ("mlp.gate", "model.layers.3"), or a
    regular expression after "re:", anchored at the start."""
    if rule.startswith("re:"):
        return re.match(rule.removeprefix("re:"), module) is not None
    return f".{rule.strip('.')}." in f".{module}."


def name_rule_matches(rule: str, module: str) -> bool:
    """The rules of compressed-tensors configs: a regular expression after "re:", anchored at the start, or the end of
    the path in whole components. Never a beginning: parents are listed there without meaning their children."""
    if rule.startswith("re:"):
        return re.match(rule.removeprefix("re:"), module) is not None
    return module == rule or module.endswith("." + rule)


def fused_names(module: str) -> list[str]:
    """The paths under which engines may hold the module together with others."""
    parent, _, leaf = module.rpartition(".")
    return [f"{parent}.{fused}" for fused, parts in FUSED.items() if leaf in parts]


def check_fused(quantized: Iterable[str], kept: Iterable[str]) -> None:
    """ValueError when of linear layers that engines fuse some are quantised and some kept. Both: module paths."""
    quantized = set(quantized)
    for module in kept:
        parent, _, leaf = module.rpartition(".")
        for parts in FUSED.values():
            mixed = [part for part in parts if leaf in parts and f"{parent}.{part}" in quantized]
            if mixed:
                raise ValueError(
                    f"{module} would stay as it is and {parent}.{mixed[0]} be quantised, but engines hold "
                    f"{', '.join(parts)} as one matrix: ignore all of them or none"
                )
