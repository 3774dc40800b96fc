"""Mixtures of experts with grouped-query attention in (almost) every layer: Qwen2-MoE, Qwen3-MoE, MiniMax-M2."""

from slime.utils.model_facts.decoder import (
    DENSE_FFN,
    EXPERT_RECIPE,
    FULL_ATTENTION,
    GROUPED_QUERY,
    NO_ATTENTION_BIAS,
    SIGMOID_RULES,
    SILU,
    SOFTMAX_ROUTER,
    decoder,
    experts_by_step,
    layer_pattern,
    sigmoid_router,
)
from slime.utils.model_facts.facts import Family, Rule, always, field, made, recipe
from slime.utils.model_facts.rope import rotary_base, rotary_percent

_ATTENTION = (*GROUPED_QUERY, always("--position-embedding-type", "rope"), always("--qk-layernorm"), rotary_base())

# transformers 5 saves num_experts under another name
_NUM_EXPERTS = made("--num-experts", lambda c: c.get("num_local_experts") or c.need("num_experts"))

FAMILIES = {
    "qwen2_moe": Family(
        facts=(
            *decoder(DENSE_FFN),
            *GROUPED_QUERY,
            always("--position-embedding-type", "rope"),
            rotary_base(),
            made("--add-qkv-bias", lambda c: c.get("qkv_bias", bool, True)),
            _NUM_EXPERTS,
            field("--moe-ffn-hidden-size", "moe_intermediate_size"),
            field("--moe-shared-expert-intermediate-size", "shared_expert_intermediate_size"),
            always("--moe-shared-expert-gate"),
            made("--moe-layer-freq", experts_by_step),
            field("--moe-router-topk", "num_experts_per_tok"),
            always("--moe-router-score-function", "softmax"),
            # this family is silent when it does not normalise the weights of the chosen experts
            made("--moe-router-pre-softmax", lambda c: not c.get("norm_topk_prob", bool, False)),
            *EXPERT_RECIPE,
        ),
        rules=(SILU, *FULL_ATTENTION),
    ),
    "qwen3_moe": Family(
        facts=(
            *decoder(DENSE_FFN),
            *_ATTENTION,
            rotary_percent(1.0, always_shown=True),
            _NUM_EXPERTS,
            field("--moe-ffn-hidden-size", "moe_intermediate_size"),
            made("--moe-layer-freq", experts_by_step),
            field("--moe-router-topk", "num_experts_per_tok"),
            *SOFTMAX_ROUTER,
            *EXPERT_RECIPE,
        ),
        rules=(SILU, *FULL_ATTENTION, NO_ATTENTION_BIAS),
    ),
    "minimax_m2": Family(
        facts=(
            always("--spec", ("slime_plugins.models.minimax_m2", "get_minimax_m2_layer_spec")),
            *decoder(DENSE_FFN),
            *_ATTENTION,
            rotary_percent(1.0, always_shown=True),
            recipe("--no-rope-fusion"),
            recipe("--attention-softmax-in-fp32"),
            field("--num-experts", "num_local_experts"),
            field("--moe-ffn-hidden-size", "intermediate_size"),
            made("--moe-layer-freq", lambda config: layer_pattern([True] * config.need("num_hidden_layers"))),
            field("--moe-router-topk", "num_experts_per_tok"),
            *sigmoid_router(balancing="none"),
            *EXPERT_RECIPE,
        ),
        rules=(
            SILU,
            *SIGMOID_RULES,
            Rule("attn_type_list", 1, "1 is softmax attention, 0 the linear attention of an older model"),
            Rule("qk_norm_type", "per_layer", "the layer spec's norm goes over all heads together"),
            Rule("use_qk_norm", True, "the layer spec normalises queries and keys"),
            Rule("use_routing_bias", True, "experts are chosen by score plus bias"),
            Rule("shared_intermediate_size", 0, "the layer spec has no shared expert"),
        ),
    ),
}
