"""The reference layout of GLM-5.2 on 256 GPUs produces the published checkpoint's tensors, each exactly once."""

import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.helpers.full_size_names import CONFIGS, exported_by_all_ranks

NAME = "glm5.2-744B-A40B"
LAYOUT = (
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8 "
    "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16 "
    "--context-parallel-size 8 --cp-comm-type allgather --expert-model-parallel-size 32 "
    "--expert-tensor-parallel-size 1 --mtp-num-layers 1"
).split()
SIZES = {"world": 256, "pp": 8, "ep": 32, "tp": 4, "etp": 1}


def wanted(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape, written from config.json alone."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    tensors["model.norm.weight"] = (hidden,)
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        computes = config["indexer_types"][layer] == "full"
        for name, shape in _layer(config, experts=layer >= config["first_k_dense_replace"], indexer=computes).items():
            tensors[f"model.layers.{layer}.{name}"] = shape
    for name, shape in _layer(config, experts=True, indexer=True).items():  # the prediction layer
        tensors[f"model.layers.{layers}.{name}"] = shape
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.{layers}.{norm}.weight"] = (hidden,)
    tensors[f"model.layers.{layers}.eh_proj.weight"] = (hidden, 2 * hidden)
    return tensors


def _layer(config: dict, experts: bool, indexer: bool) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    tensors = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (plain + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (plain + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    if indexer:
        dim, index_heads = config["index_head_dim"], config["index_n_heads"]
        tensors |= {
            "self_attn.indexer.wq_b.weight": (index_heads * dim, q_rank),
            "self_attn.indexer.wk.weight": (dim, hidden),
            "self_attn.indexer.k_norm.weight": (dim,),
            "self_attn.indexer.k_norm.bias": (dim,),
            "self_attn.indexer.weights_proj.weight": (index_heads, hidden),
        }
    if not experts:
        return tensors | _mlp("mlp", hidden, config["intermediate_size"])
    count, width = config["n_routed_experts"], config["moe_intermediate_size"]
    tensors |= {"mlp.gate.weight": (count, hidden), "mlp.gate.e_score_correction_bias": (count,)}
    tensors |= _mlp("mlp.shared_experts", hidden, config["n_shared_experts"] * width)
    for expert in range(count):
        tensors |= _mlp(f"mlp.experts.{expert}", hidden, width)
    return tensors


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    wide = {f"{prefix}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
    return wide | {f"{prefix}.down_proj.weight": (hidden, width)}


@pytest.fixture(scope="module")
def exported():
    """In a process of its own: Megatron with a fake process group must not leak into other tests."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(exported_by_all_ranks, NAME, LAYOUT, SIZES).result()


def test_every_tensor_of_glm_5_2_comes_from_exactly_one_rank(exported):
    """An indexer on a layer that reuses another's choice, an expert numbered by its own rank or a prediction layer
    called after the decoder's first one would each be here."""
    config = json.loads((CONFIGS / f"{NAME}.json").read_text())
    expected = Counter(wanted(config).items())
    assert len(expected) > 59_000
    assert not (expected - exported), sorted(expected - exported)[:5]
    assert not (exported - expected), sorted(exported - expected)[:5]
