"""GLM-4 (dense), GLM-4.5 to 4.7 (experts), GLM-4.7-Flash (latent attention), GLM-5 and 5.2 (its sparse variant)."""

from slime.utils.model_facts.decoder import (
    DENSE_FFN,
    EXPERT_RECIPE,
    GROUPED_QUERY,
    SIGMOID_RULES,
    SILU,
    decoder,
    experts_after_dense,
    router_groups,
    scaling_factor,
    shared_experts,
    sigmoid_router,
)
from slime.utils.model_facts.facts import Family, always, field, made, recipe
from slime.utils.model_facts.latent import LATENT_ATTENTION, LATENT_RULES, sparse_attention
from slime.utils.model_facts.rope import rotary_base, rotary_percent, yarn_rope

_QKV_BIAS = made("--add-qkv-bias", lambda config: config.get("attention_bias", bool, False))
_EXPERTS = (
    field("--num-experts", "n_routed_experts"),
    field("--moe-ffn-hidden-size", "moe_intermediate_size"),
    made("--moe-shared-expert-intermediate-size", shared_experts),
    made("--moe-layer-freq", experts_after_dense),
    field("--moe-router-topk", "num_experts_per_tok"),
    *router_groups(always_shown=False),
    made("--moe-router-topk-scaling-factor", scaling_factor),
    *sigmoid_router(),
    *EXPERT_RECIPE,
)
_LATENT = (
    *decoder(DENSE_FFN),
    *LATENT_ATTENTION,
    *yarn_rope(spelled_out=False),
    recipe("--no-position-embedding"),
    *_EXPERTS,
)

FAMILIES = {
    "glm4": Family(
        facts=(
            always("--spec", ("slime_plugins.models.glm4", "get_glm_spec")),
            *decoder(DENSE_FFN),
            field("--max-position-embeddings", "max_position_embeddings"),
            always("--post-self-attn-layernorm"),
            always("--post-mlp-layernorm"),
            *GROUPED_QUERY,
            _QKV_BIAS,
            always("--use-rotary-position-embeddings"),
            rotary_base(),
            rotary_percent(0.5, always_shown=True),
            always("--rotary-interleaved"),
            recipe("--no-rope-fusion"),
        ),
        rules=(SILU,),
    ),
    "glm4_moe": Family(
        facts=(
            *decoder(DENSE_FFN),
            *GROUPED_QUERY,
            _QKV_BIAS,
            made("--qk-layernorm", lambda config: config.get("use_qk_norm", bool, False)),
            always("--position-embedding-type", "rope"),
            rotary_base(),
            rotary_percent(0.5, always_shown=True),
            *_EXPERTS,
        ),
        rules=(SILU, *SIGMOID_RULES),
    ),
    "glm4_moe_lite": Family(
        facts=(*_LATENT, recipe("--make-vocab-size-divisible-by", 64)),
        rules=(SILU, *LATENT_RULES, *SIGMOID_RULES),
    ),
    "glm_moe_dsa": Family(
        facts=(
            always("--spec", ("slime_plugins.models.glm5.glm5", "get_glm5_spec")),
            *_LATENT,
            *sparse_attention(rope_interleaved=True),
            recipe("--make-vocab-size-divisible-by", 16),
        ),
        rules=(SILU, *LATENT_RULES, *SIGMOID_RULES),
    ),
}
