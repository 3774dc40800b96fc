"""Reference layouts of GLM-5.2 on 256 GPUs and of GLM-4.7 on 64: modules, bytes and tensors of all ranks together."""

import json
import math
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.helpers.full_size_names import CONFIGS, Sizes, built_by_ranks

PARALLEL = (
    "--tensor-model-parallel-size {} --sequence-parallel --pipeline-model-parallel-size {} "
    "--context-parallel-size {} --expert-model-parallel-size {} --expert-tensor-parallel-size 1 --mtp-num-layers 1 "
)
LAYOUTS = {
    "glm5.2-744B-A40B": (
        PARALLEL.format(4, 8, 8, 32) + "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16 "
        "--cp-comm-type allgather",
        Sizes(world=256, pp=8, ep=32, tp=4),
        743_377_000_704 + 9_952_920_320,  # parameters of the model and of its prediction layer
    ),
    "glm4.7-355B-A32B": (
        PARALLEL.format(8, 4, 2, 16),
        Sizes(world=64, pp=4, ep=16, tp=8),
        352_797_814_784 + 3_988_069_632,
    ),
}
CONFIG = {"glm5.2-744B-A40B": "glm5.2-744B-A40B", "glm4.7-355B-A32B": "glm4.5-355B-A32B"}


def wanted(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape, written from config.json alone."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    tensors["model.norm.weight"] = (hidden,)
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        computes = config.get("indexer_types", ["none"] * layers)[layer] == "full"
        for name, shape in _layer(config, experts=layer >= config["first_k_dense_replace"], indexer=computes).items():
            tensors[f"model.layers.{layer}.{name}"] = shape
    sparse = "indexer_types" in config
    for name, shape in _layer(config, experts=True, indexer=sparse).items():  # the prediction layer
        tensors[f"model.layers.{layers}.{name}"] = shape
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.{layers}.{norm}.weight"] = (hidden,)
    tensors[f"model.layers.{layers}.eh_proj.weight"] = (hidden, 2 * hidden)
    return tensors


def _layer(config: dict, experts: bool, indexer: bool) -> dict[str, tuple[int, ...]]:
    hidden, q_rank = config["hidden_size"], config.get("q_lora_rank")
    tensors = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    tensors |= _latent_attention(config) if q_rank else _grouped_query_attention(config)
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


def _latent_attention(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        "self_attn.q_a_proj.weight": (q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (plain + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (plain + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }


def _grouped_query_attention(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tensors = {"self_attn.o_proj.weight": (hidden, queries)}
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        tensors |= {f"self_attn.{name}_proj.weight": (width, hidden), f"self_attn.{name}_proj.bias": (width,)}
    return tensors | {f"self_attn.{name}_norm.weight": (dim,) for name in ("q", "k")}


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    wide = {f"{prefix}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
    return wide | {f"{prefix}.down_proj.weight": (hidden, width)}


@pytest.fixture(scope="module")
def built(pytestconfig):
    """In a process of its own: Megatron with a fake process group must not leak into other tests."""
    every = pytestconfig.getoption("--every-rank")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {
            name: pool.submit(built_by_ranks, CONFIG[name], flags.split(), sizes, every)
            for name, (flags, sizes, _) in LAYOUTS.items()
        }
        return {name: job.result() for name, job in jobs.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_comes_from_exactly_one_rank(built, name):
    """An indexer on a layer that reuses another's choice, an expert numbered by its own rank or a prediction layer
    called after the decoder's first one would each be here."""
    exported, _ = built[name]
    config = json.loads((CONFIGS / f"{CONFIG[name]}.json").read_text())
    expected = Counter(wanted(config).items())
    assert len(expected) > 43_000
    assert not (expected - exported), sorted(expected - exported)[:5]
    assert not (exported - expected), sorted(exported - expected)[:5]
    parameters = [shape for tensor, shape in exported if not tensor.endswith("e_score_correction_bias")]
    assert sum(map(math.prod, parameters)) == LAYOUTS[name][2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_of_rank_holds_the_bytes_of_the_plan(built, name):
    """Ranks of a stage differ in their tensor- and expert-parallel rank alone: the first, a middle and the last one
    (with --every-rank all of them) hold the same names and shapes, and the plan's elements and bytes."""
    _, sizes, _ = LAYOUTS[name]
    _, ranks = built[name]
    for stage in range(sizes.pp):
        there = [rank for rank in ranks.values() if rank.groups[2] == stage]
        places = [rank.groups[:2] for rank in there]
        assert len(there) >= 3 and (places[0], places[-1]) == ((0, 0), (sizes.tp - 1, sizes.ep - 1))
        assert any(tp not in (0, sizes.tp - 1) and ep not in (0, sizes.ep - 1) for tp, ep in places)
        for rank in there:
            assert rank.shapes == there[0].shapes
            assert (rank.elements, rank.buffers, rank.size) == rank.planned
