"""Qwen2 (q, k, v with bias) and Qwen3 (q and k normalised per head), dense."""

from slime.backends.megatron_utils.megatron_to_hf.family import (
    MLP_ROWS,
    MODEL_ROWS,
    QK_NORM_ROWS,
    Family,
    attention_rows,
)

QWEN2 = Family("qwen2/qwen3", MODEL_ROWS, attention_rows() + QK_NORM_ROWS + MLP_ROWS)
