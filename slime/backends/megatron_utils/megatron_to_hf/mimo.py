"""MiMo: a Qwen2 with multi-token-prediction layers."""

from slime.backends.megatron_utils.megatron_to_hf.family import (
    MLP_ROWS,
    MODEL_ROWS,
    SWAPPED_HALVES,
    Family,
    MultiTokenPrediction,
    Row,
    attention_rows,
)

_LAYER = "model.mtp_layers.{depth}."

MIMO = Family(
    "mimo",
    MODEL_ROWS,
    attention_rows() + MLP_ROWS,
    mtp=MultiTokenPrediction(
        _LAYER,
        _LAYER,
        (
            Row("enorm.weight", ("token_layernorm.weight",)),
            Row("hnorm.weight", ("hidden_layernorm.weight",)),
            Row("eh_proj.weight", ("input_proj.weight",), SWAPPED_HALVES),
            Row("final_layernorm.weight", ("final_layernorm.weight",)),
        ),
    ),
)
