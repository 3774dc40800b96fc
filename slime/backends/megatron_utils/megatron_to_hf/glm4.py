"""GLM-4-0414 and GLM-Z1, dense: norms before and after attention and MLP, gate and up projection in one tensor."""

from slime.backends.megatron_utils.megatron_to_hf.family import (
    MODEL_ROWS,
    PACKED_GATE_UP,
    Family,
    Row,
    attention_rows,
)

GLM4 = Family(
    "glm4",
    MODEL_ROWS,
    attention_rows()
    + (
        Row("post_self_attn_layernorm.weight", ("post_self_attn_layernorm.weight",)),
        Row("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
        Row("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",), PACKED_GATE_UP),
        Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
        Row("post_mlp_layernorm.weight", ("post_mlp_layernorm.weight",)),
    ),
)
