"""The FLOPs polynomial equals a count over the matrix products of a model, layer by layer."""

from argparse import Namespace

import pytest

from slime.utils.flops_utils import calculate_fwd_flops, fwd_flops_per_sample

DENSE = {
    "num_layers": 3,
    "hidden_size": 40,
    "num_attention_heads": 6,
    "kv_channels": 16,
    "group_query_attention": True,
    "num_query_groups": 2,
    "multi_latent_attention": False,
    "ffn_hidden_size": 72,
    "swiglu": True,
    "num_experts": None,
    "vocab_size": 99,
    "padded_vocab_size": None,
}
MOE = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 3,
    "moe_shared_expert_intermediate_size": 20,
    "moe_layer_freq": [0, 1, 1],
}
MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 14,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 18,
}


def matmul(m, k, n):
    return 2 * m * k * n


def causal(heads, s, width):
    """Half of the s x s scores, each a product of `width` terms."""
    return heads * matmul(s, width, s) / 2


def count(s, moe_layers=0, heads_dim=16):
    """Products of the dense (heads * head_dim != hidden) and mixed models above."""
    attention = matmul(s, 40, 6 * heads_dim) + 2 * matmul(s, 40, 2 * heads_dim) + matmul(s, 6 * heads_dim, 40)
    attention += 2 * causal(6, s, heads_dim)
    dense = 3 * matmul(s, 40, 72)
    moe = 3 * 3 * matmul(s, 40, 24) + 3 * matmul(s, 40, 20) + matmul(s, 40, 8)
    return 3 * attention + (3 - moe_layers) * dense + moe_layers * moe + matmul(s, 40, 99)


def test_dense_with_grouped_queries_and_wide_heads():
    assert calculate_fwd_flops([5, 17], Namespace(**DENSE)) == count(5) + count(17)
    assert fwd_flops_per_sample([5, 17], Namespace(**DENSE)) == [count(5), count(17)]


def test_ungated_mlp_and_default_head_dimension():
    args = Namespace(**{**DENSE, "swiglu": False, "kv_channels": None, "hidden_size": 48, "num_attention_heads": 6})
    s, h = 7, 48
    attention = 2 * matmul(s, h, h) + 2 * matmul(s, h, 16) + 2 * causal(6, s, 8)
    assert calculate_fwd_flops([s], args) == 3 * (attention + 2 * matmul(s, h, 72)) + matmul(s, h, 99)


def test_default_ffn_size_is_megatrons():
    small, explicit = {**DENSE, "ffn_hidden_size": None}, {**DENSE, "ffn_hidden_size": 64}  # 4 * 40 * 2/3 = 106 -> 64
    assert calculate_fwd_flops([9], Namespace(**small)) == calculate_fwd_flops([9], Namespace(**explicit))


@pytest.mark.parametrize(("freq", "moe_layers"), [([0, 1, 1], 2), ("[0]+[1]*2", 2), (1, 3), (2, 2), ("3", 1)])
def test_mixture_of_experts_counts_active_columns_only(freq, moe_layers):
    args = Namespace(**{**DENSE, **MOE, "moe_layer_freq": freq})
    assert calculate_fwd_flops([11], args) == count(11, moe_layers)


def test_wrong_layer_list_is_refused():
    with pytest.raises(ValueError, match="describes 2 layers, --num-layers is 3"):
        calculate_fwd_flops([1], Namespace(**{**DENSE, **MOE, "moe_layer_freq": [0, 1]}))


@pytest.mark.parametrize("q_lora", [12, None])
def test_latent_attention(q_lora):
    s, heads = 13, 6
    query = matmul(s, 40, 12) + matmul(s, 12, heads * 18) if q_lora else matmul(s, 40, heads * 18)
    key_value = matmul(s, 40, 10 + 4) + matmul(s, 10, heads * (14 + 18))
    attention = query + key_value + causal(heads, s, 18) + causal(heads, s, 18) + matmul(s, heads * 18, 40)
    expected = 3 * (attention + 3 * matmul(s, 40, 72)) + matmul(s, 40, 99)
    assert calculate_fwd_flops([s], Namespace(**{**DENSE, **MLA, "q_lora_rank": q_lora})) == expected
