"""Qwen2-MoE (shared expert with a gate) and Qwen3-MoE."""

from slime.backends.megatron_utils.megatron_to_hf.family import (
    MLP_ROWS,
    MODEL_ROWS,
    QK_NORM_ROWS,
    Family,
    Row,
    attention_rows,
    moe_rows,
    shared_expert_rows,
)

SHARED_EXPERT_GATE_ROW = Row("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",))

QWEN_MOE_ROWS = moe_rows() + shared_expert_rows("mlp.shared_expert") + (SHARED_EXPERT_GATE_ROW,)

QWEN3MOE = Family("qwen2_moe/qwen3_moe", MODEL_ROWS, attention_rows() + QK_NORM_ROWS + MLP_ROWS + QWEN_MOE_ROWS)
