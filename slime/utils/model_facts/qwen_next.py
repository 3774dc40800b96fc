"""Qwen3-Next and Qwen3.5: gated attention in every fourth layer, gated delta nets in the others."""

from slime.utils.model_facts.config import Config
from slime.utils.model_facts.decoder import (
    DENSE_FFN,
    EXPERT_RECIPE,
    GROUPED_QUERY,
    NO_ATTENTION_BIAS,
    SILU,
    SOFTMAX_ROUTER,
    decoder,
    experts_by_step,
    layer_pattern,
)
from slime.utils.model_facts.facts import Family, Rule, Value, always, field, made
from slime.utils.model_facts.rope import rotary_base, rotary_percent


def _linear_layers(config: Config) -> Value:
    """--linear-attention-freq: N for one full-attention layer every N layers, else a 0/1 list (1: delta net)."""
    layers, interval = config.need("num_hidden_layers"), config.get("full_attention_interval")
    types = config.get("layer_types", list)
    if types is None:
        return config.need("full_attention_interval")
    wrong = sorted({str(kind) for kind in types} - {"linear_attention", "full_attention"})
    if wrong:
        raise config.error("layer_types", f"has {', '.join(wrong)}; the kinds are linear_attention and full_attention")
    if len(types) != layers:
        raise config.error("layer_types", f"has {len(types)} entries for {layers} layers")
    linear = [kind == "linear_attention" for kind in types]
    first_full = linear.index(False) + 1 if False in linear else None
    if first_full is not None and linear == [bool((i + 1) % first_full) for i in range(layers)]:
        value: Value = first_full
    else:
        value = layer_pattern(linear)
    if interval is not None and linear != [bool((i + 1) % interval) if interval else True for i in range(layers)]:
        raise config.error("full_attention_interval", f"is {interval}, and layer_types says {value}")
    return value


def _mlp_width(config: Config) -> int:
    """Width of a dense MLP, of which a model with experts in every layer has none to state."""
    return config.get("intermediate_size") or config.need("moe_intermediate_size")


_MIXER = (
    always("--apply-layernorm-1p"),
    *GROUPED_QUERY,
    always("--qk-layernorm"),
    always("--attention-output-gate"),
    made("--linear-attention-freq", _linear_layers),
    field("--linear-conv-kernel-dim", "linear_conv_kernel_dim"),
    field("--linear-key-head-dim", "linear_key_head_dim"),
    field("--linear-value-head-dim", "linear_value_head_dim"),
    field("--linear-num-key-heads", "linear_num_key_heads"),
    field("--linear-num-value-heads", "linear_num_value_heads"),
    always("--position-embedding-type", "rope"),
    rotary_base(),
    rotary_percent(0.25, always_shown=True),
)
_EXPERTS = (
    field("--num-experts", "num_experts"),
    field("--moe-ffn-hidden-size", "moe_intermediate_size"),
    field("--moe-shared-expert-intermediate-size", "shared_expert_intermediate_size"),
    always("--moe-shared-expert-gate"),
    made("--moe-layer-freq", experts_by_step),
    field("--moe-router-topk", "num_experts_per_tok"),
    *SOFTMAX_ROUTER,
    *EXPERT_RECIPE,
)
_RULES = (SILU, NO_ATTENTION_BIAS, Rule("attn_output_gate", True, "attention of this family is gated"))
_QWEN3_5_VL = ("slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider")
_QWEN3_5_SPEC = always("--spec", ("slime_plugins.models.qwen3_5", "get_qwen3_5_spec"))

_QWEN3_5 = Family(
    facts=(_QWEN3_5_SPEC, *decoder(DENSE_FFN), *_MIXER),
    rules=_RULES,
    multimodal_spec=_QWEN3_5_VL,
)
_QWEN3_5_MOE = Family(
    facts=(_QWEN3_5_SPEC, *decoder(made("--ffn-hidden-size", _mlp_width)), *_MIXER, *_EXPERTS),
    rules=_RULES,
    multimodal_spec=_QWEN3_5_VL,
)

FAMILIES = {
    "qwen3_next": Family(
        facts=(
            always("--spec", ("slime_plugins.models.qwen3_next", "get_qwen3_next_spec")),
            *decoder(DENSE_FFN),
            *_MIXER,
            *_EXPERTS,
        ),
        rules=_RULES,
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
