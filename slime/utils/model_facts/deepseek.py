"""DeepSeek-V3, R1 and V3.2, Moonlight, Kimi-K2: multi-latent attention and group-limited sigmoid routing."""

from slime.utils.model_facts.decoder import (
    DENSE_FFN,
    EXPERT_RECIPE,
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
from slime.utils.model_facts.rope import yarn_rope

_DEEPSEEK = (
    *decoder(DENSE_FFN),
    *LATENT_ATTENTION,
    recipe("--attention-softmax-in-fp32"),
    *yarn_rope(spelled_out=True),
    field("--num-experts", "n_routed_experts"),
    field("--moe-ffn-hidden-size", "moe_intermediate_size"),
    made("--moe-shared-expert-intermediate-size", shared_experts),
    made("--moe-layer-freq", experts_after_dense),
    field("--moe-router-topk", "num_experts_per_tok"),
    *router_groups(always_shown=True),
    made("--moe-router-topk-scaling-factor", scaling_factor),
    *sigmoid_router(),
    *EXPERT_RECIPE,
)
_RULES = (SILU, *LATENT_RULES, *SIGMOID_RULES)
_V3 = Family(facts=_DEEPSEEK, rules=_RULES)

FAMILIES = {
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "kimi_k25": _V3,
    "deepseek_v32": Family(
        facts=(
            always("--spec", ("slime_plugins.models.glm5.glm5", "get_glm5_spec")),
            *_DEEPSEEK,
            *sparse_attention(rope_interleaved=False),
        ),
        rules=_RULES,
    ),
}
