"""Name conversion, buckets and atomic groups: pure functions, no process group."""

from argparse import Namespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf, family_of
from slime.backends.megatron_utils.megatron_to_hf.family import GATE_UP, GATED_QKV, QKV, SWAPPED_HALVES, UNCHANGED
from slime.backends.megatron_utils.update_weight.buckets import atomic_groups, flatten, plan_buckets

ARGS = Namespace(
    num_attention_heads=6,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=5,
    hidden_size=7,
    vocab_size=11,
    model_name=None,
)
LAYER = "module.module.decoder.layers.3."


def _fused_qkv(q, k, v):
    """Megatron's layout, written row by row."""
    rows = []
    for group in range(2):
        rows += [q[head * 5 + d] for head in range(group * 3, group * 3 + 3) for d in range(5)]
        rows += [k[group * 5 + d] for d in range(5)]
        rows += [v[group * 5 + d] for d in range(5)]
    return torch.stack(rows)


@pytest.mark.parametrize("shape", [(7,), ()])
def test_qkv_rows_go_to_the_right_heads(shape):
    q, k, v = (torch.randn(rows, *shape) for rows in (30, 10, 10))
    kind = "weight" if shape else "bias"
    name = f"{LAYER}self_attention.linear_qkv.{kind}"
    got = dict(convert_to_hf(ARGS, "Qwen2Config", name, _fused_qkv(q, k, v)))
    assert list(got) == [f"model.layers.3.self_attn.{x}_proj.{kind}" for x in "qkv"]
    for part, wanted in zip(got.values(), (q, k, v), strict=True):
        assert torch.equal(part, wanted)


def test_gate_comes_before_up():
    fc1 = torch.randn(8, 7)
    got = dict(convert_to_hf(ARGS, "llama", f"{LAYER}mlp.linear_fc1.weight", fc1))
    assert torch.equal(got["model.layers.3.mlp.gate_proj.weight"], fc1[:4])
    assert torch.equal(got["model.layers.3.mlp.up_proj.weight"], fc1[4:])


def _naive_gated_qkv(q, k, v, dims):
    """Megatron's rows, one by one: for each group its queries, their gates, its key, its value."""
    heads, groups, dim = dims.num_attention_heads, dims.num_query_groups, dims.kv_channels
    each = heads // groups
    rows = []
    for group in range(groups):
        members = range(group * each, group * each + each)
        rows += [q[(2 * head) * dim + d] for head in members for d in range(dim)]
        rows += [q[(2 * head + 1) * dim + d] for head in members for d in range(dim)]
        rows += [k[group * dim + d] for d in range(dim)]
        rows += [v[group * dim + d] for d in range(dim)]
    return torch.stack(rows)


def test_a_gated_query_keeps_each_heads_gate_beside_it():
    """The checkpoint stores (query, gate) head by head, Megatron all queries of a group before all of their gates."""
    q, k, v = torch.randn(60, 7), torch.randn(10, 7), torch.randn(10, 7)
    fused = _naive_gated_qkv(q, k, v, ARGS)
    assert torch.equal(GATED_QKV.merge(ARGS, (q, k, v)), fused)
    for part, wanted in zip(GATED_QKV.split(ARGS, fused), (q, k, v), strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.parametrize(
    "transform, rows, columns",
    [(UNCHANGED, 6, 5), (GATE_UP, 8, 7), (QKV, 50, 7), (GATED_QKV, 80, 7), (SWAPPED_HALVES, 7, 14)],
)
def test_merging_undoes_splitting(transform, rows, columns):
    param = torch.randn(rows, columns)
    assert torch.equal(transform.merge(ARGS, transform.split(ARGS, param)), param)


@pytest.mark.parametrize(
    "model, name, wanted",
    [
        ("glm_moe_dsa", "decoder.layers.6.self_attention.core_attention.indexer.linear_wk.weight",
         ["model.layers.6.self_attn.indexer.wk.weight"]),
        ("glm_moe_dsa", "mtp.layers.0.eh_proj.weight", ["model.layers.78.eh_proj.weight"]),
        ("Glm4MoeConfig", "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight31",
         ["model.layers.78.mlp.experts.31.gate_proj.weight", "model.layers.78.mlp.experts.31.up_proj.weight"]),
        ("glm4_moe_lite", "decoder.layers.1.self_attention.linear_kv_down_proj.weight",
         ["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]),
        ("kimi_k2", "decoder.layers.60.mlp.router.expert_bias",
         ["model.layers.60.mlp.gate.e_score_correction_bias"]),
        ("MiniMaxM2Config", "decoder.layers.2.mlp.experts.linear_fc2.weight255",
         ["model.layers.2.block_sparse_moe.experts.255.w2.weight"]),
        ("qwen2_moe", "decoder.layers.0.mlp.shared_experts.gate_weight",
         ["model.layers.0.mlp.shared_expert_gate.weight"]),
        ("mimo", "mtp.layers.1.mtp_model_layer.self_attention.linear_proj.weight",
         ["model.mtp_layers.1.self_attn.o_proj.weight"]),
    ],
)  # fmt: skip
def test_names_of_experts_indexers_and_prediction_layers(model, name, wanted):
    assert family_of(model).hf_names(Namespace(num_layers=78), name) == wanted


def test_sandwich_norms_of_a_moe_model_are_refused_with_the_family_that_has_them():
    """A GLM-4.5 model built with dense GLM-4's norms used to lose them on the way to the engine."""
    with pytest.raises(ValueError, match=r"glm4_moe family has no parameter .*post_self_attn.*dense GLM-4 \(glm4\)"):
        convert_to_hf(ARGS, "glm4_moe", f"{LAYER}post_self_attn_layernorm.weight", torch.zeros(7))


def test_a_family_without_prediction_layers_refuses_them():
    with pytest.raises(ValueError, match=r"no parameter mtp\.layers\.0\.eh_proj\.weight"):
        convert_to_hf(ARGS, "qwen3", "mtp.layers.0.eh_proj.weight", torch.zeros(7, 14))


def test_a_model_is_not_taken_for_its_dense_namesake():
    """The longest name wins: a table of the dense Qwen3 would lose a hybrid's experts and linear attention."""
    names = ("qwen3_next", "Qwen3_5MoeConfig", "qwen3_5_moe_text", "Qwen3MoeConfig", "qwen3", "glm4_moe_lite", "glm4")
    families = [family_of(name).name for name in names]
    assert len(set(families)) == len(families), families
    with pytest.raises(ValueError, match="no weight conversion"):
        family_of("qwen3_vl")


def test_vocabulary_padding_is_removed():
    for name, hf in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        ((got_name, got),) = convert_to_hf(ARGS, "qwen3", f"module.{name}.weight", torch.randn(16, 7))
        assert got_name == f"{hf}.weight" and got.shape == (11, 7)


def test_an_unknown_parameter_names_its_neighbours():
    with pytest.raises(ValueError, match=r"qwen2/qwen3 family has no parameter .*linear_pro\.weight.*linear_proj"):
        convert_to_hf(ARGS, "qwen3", f"{LAYER}self_attention.linear_pro.weight", torch.zeros(1))


def test_llama_has_no_query_norm():
    with pytest.raises(ValueError, match="llama family"):
        convert_to_hf(ARGS, "llama", f"{LAYER}self_attention.q_layernorm.weight", torch.zeros(5))


def test_model_names_are_normalised_and_unknown_ones_refused():
    assert family_of("Qwen3Config") is family_of("qwen2_5") is family_of("qwen2")
    with pytest.raises(ValueError, match="known are .*qwen2, qwen3, llama"):
        family_of("gpt-neox")


def test_weights_look_like_the_quantised_checkpoint():
    """An FP8 engine that is sent bfloat16 values under the names of FP8 ones computes garbage."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [2, 2]}
    got = dict(convert_to_hf(ARGS, "llama", f"{LAYER}mlp.linear_fc1.weight", torch.randn(8, 7), config))
    gate = "model.layers.3.mlp.gate_proj.weight"
    assert list(got)[:2] == [gate, f"{gate}_scale_inv"] and len(got) == 4
    assert got[gate].dtype == torch.float8_e4m3fn and got[f"{gate}_scale_inv"].shape == (2, 4)
    head = convert_to_hf(ARGS, "llama", "output_layer.weight", torch.randn(16, 7), config)
    assert [(name, tensor.dtype) for name, tensor in head] == [("lm_head.weight", torch.float32)]
    with pytest.raises(ValueError, match="mxfp4"):
        convert_to_hf(ARGS, "llama", f"{LAYER}mlp.linear_fc1.weight", torch.randn(8, 7), {"quant_method": "mxfp4"})


def _named(*sizes):
    return [(f"t{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60))
def test_buckets_keep_order_and_size(sizes, limit):
    """Nothing lost or reordered; no bucket over the limit unless it is one tensor; none could take its successor."""
    tensors = _named(*sizes)
    buckets = list(plan_buckets(([tensor] for tensor in tensors), limit))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in tensors]
    totals = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
    assert all(total <= limit or len(bucket) == 1 for total, bucket in zip(totals, buckets, strict=True))
    assert all(a + b[0][1].nbytes > limit for a, b in zip(totals, buckets[1:], strict=False))


def test_an_atomic_item_is_never_split():
    a, b, c, d = _named(5, 5, 5, 1)
    assert [len(bucket) for bucket in plan_buckets([[a], [b, c], [d]], 11)] == [1, 3]


def test_fused_projections_travel_together():
    names = ["q_down_proj.weight", "q_up_proj.weight", "kv_down_proj.weight"]
    params = [(f"decoder.layers.{i}.self_attention.linear_{name}", torch.zeros(1)) for i in (0, 1) for name in names]
    groups = [[name.split("linear_")[1] for name, _ in group] for group in atomic_groups(params)]
    assert groups == [[names[1]], [names[0], names[2]]] * 2
    with pytest.raises(ValueError, match=r"layers\.1.*no partner"):
        list(atomic_groups(params[:-1]))


def test_flatten_is_the_bytes_in_order():
    bucket = [("a", torch.tensor([1.5, -2.0])), ("b", torch.tensor([[7], [9]], dtype=torch.int16).t())]
    flat = flatten(bucket)
    assert torch.equal(flat[:8].view(torch.float32), bucket[0][1])
    assert flat[8:].view(torch.int16).tolist() == [7, 9]


def test_tensors_of_a_bucket_are_aligned():
    """An engine views the flattened bytes as each dtype, which needs a start at a multiple of its size."""
    tensors = [
        ("odd", torch.zeros(3, dtype=torch.bfloat16)),
        ("wide", torch.zeros(2)),
        ("byte", torch.zeros(1).byte()),
    ]
    (bucket,) = plan_buckets(([tensor] for tensor in tensors), 1000)
    parts = flatten(bucket).split([tensor.nbytes for _, tensor in bucket])
    assert all(part.view(tensor.dtype).equal(tensor) for part, (_, tensor) in zip(parts, bucket, strict=True))
    assert sorted(name for name, _ in bucket) == ["byte", "odd", "wide"]
