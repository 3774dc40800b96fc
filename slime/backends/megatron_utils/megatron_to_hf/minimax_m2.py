"""MiniMax-M2: q and k normalised over all heads together, experts with a routing bias, no dense MLP."""

from slime.backends.megatron_utils.megatron_to_hf.family import (
    MODEL_ROWS,
    Family,
    Row,
    attention_rows,
    moe_rows,
)

_MOE = "block_sparse_moe"

MINIMAX_M2 = Family(
    "minimax_m2",
    MODEL_ROWS,
    attention_rows()
    + (
        Row("self_attention.q_norm.weight", ("self_attn.q_norm.weight",)),
        Row("self_attention.k_norm.weight", ("self_attn.k_norm.weight",)),
        Row("mlp.router.expert_bias", (f"{_MOE}.e_score_correction_bias",)),
    )
    + moe_rows(_MOE, gate="w1", up="w3", down="w2"),
)
