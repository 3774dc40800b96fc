"""Llama 2 and 3, dense."""

from slime.backends.megatron_utils.megatron_to_hf.family import MLP_ROWS, MODEL_ROWS, Family, Row, attention_rows

# The norm before the MLP is a module of its own when the layer spec does not fuse it.
LLAMA = Family(
    "llama",
    MODEL_ROWS,
    attention_rows() + MLP_ROWS + (Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),),
)
