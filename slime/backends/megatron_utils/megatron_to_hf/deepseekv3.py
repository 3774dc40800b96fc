"""DeepSeek-V3, V3.2, Kimi-K2, K2.5, Moonlight, GLM-4.7-Flash, GLM-5, GLM-5.2: latent attention, perhaps an indexer."""

from dataclasses import replace

from slime.backends.megatron_utils.megatron_to_hf.family import (
    EXPERT_BIAS_ROW,
    MLP_ROWS,
    MODEL_ROWS,
    MTP_AS_LAYER,
    OUTPUT_ROW,
    PASSED_OVER,
    Family,
    Row,
    moe_rows,
    shared_expert_rows,
)

MLA_ROWS = (
    Row("input_layernorm.weight", ("input_layernorm.weight",)),
    OUTPUT_ROW,
    Row("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",)),
    Row("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",)),
    Row("self_attention.linear_q_up_proj.layer_norm_weight", ("self_attn.q_a_layernorm.weight",)),
    Row("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",)),
    Row("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",)),
    Row("self_attention.linear_kv_up_proj.layer_norm_weight", ("self_attn.kv_a_layernorm.weight",)),
    Row("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",)),
    # Megatron's sparse attention keeps the two latent norms as modules of their own.
    Row("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    Row("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
)

# Only layers that compute their own top-k have an indexer; head rows are [rope | nope] on both sides.
_INDEXER = "self_attention.core_attention.indexer."
INDEXER_ROWS = (
    Row(f"{_INDEXER}linear_wq_b.weight", ("self_attn.indexer.wq_b.weight",)),
    Row(f"{_INDEXER}linear_wk.weight", ("self_attn.indexer.wk.weight",)),
    Row(f"{_INDEXER}k_norm.weight", ("self_attn.indexer.k_norm.weight",)),
    Row(f"{_INDEXER}k_norm.bias", ("self_attn.indexer.k_norm.bias",)),
    Row(f"{_INDEXER}linear_weights_proj.weight", ("self_attn.indexer.weights_proj.weight",)),
)

DEEPSEEKV3 = Family(
    "deepseek_v3/glm_moe_dsa",
    MODEL_ROWS,
    MLA_ROWS + INDEXER_ROWS + MLP_ROWS + moe_rows() + (EXPERT_BIAS_ROW,) + shared_expert_rows("mlp.shared_experts"),
    mtp=MTP_AS_LAYER,
)

# Kimi-K2.5: the language model beside a vision tower.
KIMI_K25 = replace(
    DEEPSEEKV3,
    name="kimi_k25",
    model_rows=tuple(replace(row, hf=tuple(f"language_model.{name}" for name in row.hf)) for row in MODEL_ROWS),
    layer_prefix="language_model.model.layers.{layer}.",
    mtp=None,
    passed_over=(*PASSED_OVER, r"(vision_tower|mm_projector)\..*"),
)
