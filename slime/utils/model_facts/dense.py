"""Dense models with grouped-query attention: Qwen2(.5), Qwen3, Llama 3, MiMo."""

from slime.utils.model_facts.decoder import (
    DENSE_FFN,
    FULL_ATTENTION,
    GROUPED_QUERY,
    NO_ATTENTION_BIAS,
    SILU,
    decoder,
)
from slime.utils.model_facts.facts import Family, Rule, always, field, maybe
from slime.utils.model_facts.rope import llama_rope, rotary_base, rotary_percent

_DENSE = (*decoder(DENSE_FFN), *GROUPED_QUERY, always("--use-rotary-position-embeddings"))
_PLAIN_ROPE = (rotary_base(), rotary_percent(1.0, always_shown=False))
_POSITIONS = field("--max-position-embeddings", "max_position_embeddings")

FAMILIES = {
    "qwen2": Family(
        facts=(*_DENSE, *_PLAIN_ROPE, always("--add-qkv-bias")),
        rules=(SILU, *FULL_ATTENTION),
    ),
    "qwen3": Family(
        facts=(*_DENSE, *_PLAIN_ROPE, always("--qk-layernorm")),
        rules=(SILU, *FULL_ATTENTION, NO_ATTENTION_BIAS),
    ),
    "llama": Family(
        facts=(*_DENSE, *llama_rope(), _POSITIONS),
        rules=(SILU, NO_ATTENTION_BIAS, Rule("mlp_bias", False, "--disable-bias-linear has none")),
    ),
    "mimo": Family(
        facts=(
            *_DENSE,
            *_PLAIN_ROPE,
            _POSITIONS,
            always("--add-qkv-bias"),
            maybe("--mtp-num-layers", "num_nextn_predict_layers"),
        ),
        rules=(SILU, *FULL_ATTENTION, Rule("attention_bias", True, "query, key and value have biases in this family")),
    ),
}
