"""GLM-4.5, GLM-4.6, GLM-4.7: grouped-query attention, experts with a routing bias, a multi-token-prediction layer."""

from slime.backends.megatron_utils.megatron_to_hf.family import (
    EXPERT_BIAS_ROW,
    MLP_ROWS,
    MODEL_ROWS,
    MTP_AS_LAYER,
    QK_NORM_ROWS,
    Family,
    attention_rows,
    moe_rows,
    shared_expert_rows,
)

GLM4MOE = Family(
    "glm4_moe",
    MODEL_ROWS,
    attention_rows()
    + QK_NORM_ROWS
    + MLP_ROWS
    + moe_rows()
    + (EXPERT_BIAS_ROW,)
    + shared_expert_rows("mlp.shared_experts"),
    mtp=MTP_AS_LAYER,
)
