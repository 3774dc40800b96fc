"""FLOPs of a model: products that torch counts in tiny models, and naive sums over pairs of tokens for the rest."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slime.utils.flops import (
    Cost,
    ModelFlops,
    attention_cost,
    flops_of_sequences,
    indexer_cost,
    mlp_flops,
    peak_tflops,
)
from slime.utils.model_shape import (
    DeltaNet,
    Dense,
    Experts,
    GroupedQuery,
    Indexer,
    Latent,
    LayerShape,
    ModelShape,
    ShapeError,
)
from tests.helpers.shape_args import shape_args
from tests.helpers.tiny_models import TINY_MODELS, _config, megatron_flags

HIDDEN, VOCAB = 40, 99
GROUPED = GroupedQuery(6, 2, 16, qkv_bias=False, out_bias=False, qk_norm="none", output_gate=False)
LATENT = Latent(6, query_rank=12, kv_rank=10, nope_dim=14, rope_dim=4, value_dim=18, norm=True, indexer=None)
INDEXER = Indexer(heads=5, head_dim=8, topk=7, own=True)
MLP = Dense(ffn=72, gated=True, bias=False)


def model(*layers, mtp_layer=None):
    return ModelShape(
        hidden=HIDDEN,
        vocab=VOCAB,
        vocab_divisor=128,
        padded_vocab=None,
        tied=False,
        norm_vectors=1,
        positions=0,
        layers=layers,
        mtp_layers=1 if mtp_layer else 0,
        mtp_layer=mtp_layer,
        uncounted=(),
    )


def sparse(own):
    return Latent(**{**vars(LATENT), "indexer": Indexer(**{**vars(INDEXER), "own": own})})


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3_plain_queries", "glm5_2"])
def test_products_equal_what_torch_counts(name):
    """transformers' eager attention multiplies all s^2 pairs of queries and keys, and never absorbs."""
    import transformers

    config = _config(name, {})
    config._attn_implementation = config._experts_implementation = "eager"
    network = getattr(transformers, TINY_MODELS[name][1])(config).float().eval()
    flags = [flag for flag in megatron_flags(name) if flag != "--mtp-num-layers"]
    shape = ModelShape.from_args(shape_args(flags, hf_config=config.to_dict(), mtp_num_layers=None))
    whole = Cost(token=2 * shape.hidden * shape.vocab)
    for layer in shape.layers:
        whole += attention_cost(layer.attention, shape.hidden, absorbed=False)
        whole += indexer_cost(layer.attention, shape.hidden) + Cost(token=mlp_flops(layer.mlp, shape.hidden))
    for length in (11, 24):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network(torch.randint(0, config.vocab_size, (1, length)))
        angles = 2 * network.model.rotary_emb.inv_freq.numel() * length  # position x frequency
        assert counter.get_total_flops() - angles == whole.token * length + (whole.pair + whole.chosen) * length**2


def naive_pairs(length, topk=None):
    """Pairs of a token with one it attends to."""
    return sum(min(t + 1, topk or length) for t in range(length))


@pytest.mark.parametrize("length", [1, 6, 7, 8, 30])
def test_sparse_layers_count_chosen_pairs_and_computing_layers_all_pairs(length):
    """Absorbed latent attention over min(t, topk) tokens; only a layer with its own indexer scores all of them."""
    own, shared = (attention_cost(sparse(o), HIDDEN) + indexer_cost(sparse(o), HIDDEN) for o in (True, False))
    heads, every = 6, naive_pairs(length)
    token = 2 * (12 * (40 + 6 * 18) + 40 * 14 + 6 * 18 * 40)  # queries, compressed keys and values, output
    token += 2 * 6 * 10 * (14 + 18)  # queries folded into the compressed space, values out of it
    chosen = naive_pairs(length, 7) * 2 * heads * ((10 + 4) + 10)
    indexer = length * 2 * (12 * 5 * 8 + 40 * 8 + 40 * 5) + every * 2 * 5 * (8 + 1)
    assert shared.of(length, 7) == token * length + chosen
    assert own.of(length, 7) == token * length + chosen + indexer


def test_dense_latent_attention_is_not_absorbed_unless_asked():
    token = 2 * (12 * (40 + 6 * 18) + 40 * 14 + 10 * 6 * 32 + 6 * 18 * 40)
    assert attention_cost(LATENT, HIDDEN) == Cost(token, pair=2 * 6 * (18 + 18))
    assert attention_cost(LATENT, HIDDEN, absorbed=True) == Cost(token, pair=2 * 6 * (14 + 10))


def test_gated_delta_net_is_linear():
    """Products of the recurrent form, step by step."""
    net = DeltaNet(key_heads=2, value_heads=4, key_dim=6, value_dim=5, conv_kernel=3)
    state = 4 * (6 * 5)
    projections = 40 * (12 + 12 + 20 + 20 + 4 + 4) + 20 * 40
    convolution = 3 * (12 + 12 + 20)
    assert attention_cost(net, HIDDEN) == Cost(token=2 * (projections + convolution + 3 * state))


def test_experts_count_the_active_ones_router_and_shared():
    experts = Experts(8, topk=3, ffn=24, gated=True, shared_ffn=20, shared_gate=True, router_bias=True)
    assert mlp_flops(experts, HIDDEN) == 2 * 40 * (3 * 3 * 24 + 3 * 20 + 8 + 1)
    assert mlp_flops(Dense(72, gated=False, bias=False), HIDDEN) == 2 * 40 * 2 * 72


def test_an_output_gate_is_as_wide_as_the_queries():
    gated = GroupedQuery(**{**vars(GROUPED), "output_gate": True})
    assert attention_cost(gated, HIDDEN).token - attention_cost(GROUPED, HIDDEN).token == 2 * 40 * 96


def test_attention_is_within_each_sequence():
    flops = ModelFlops.of(model(LayerShape(GROUPED, MLP, False)))
    apart, together = flops.forward([5, 17]), flops.forward([22])
    assert together - apart == (naive_pairs(22) - naive_pairs(5) - naive_pairs(17)) * 4 * 6 * 16
    assert flops.forward([5, 17]) == flops.forward([5]) + flops.forward([17])


def test_only_scored_tokens_pass_the_head():
    flops = ModelFlops.of(model(LayerShape(GROUPED, MLP, False)))
    assert flops.forward([5, 17]) - flops.forward([5, 17], 6) == (22 - 6) * 2 * HIDDEN * VOCAB


def test_training_is_three_passes_but_one_of_a_frozen_indexer():
    layers = [LayerShape(sparse(own), MLP, False) for own in (True, False, False)]
    flops = ModelFlops.of(model(*layers, mtp_layer=layers[0]))
    lengths = [9, 4]
    indexers = sum(indexer_cost(sparse(True), HIDDEN).of(length, 7) for length in lengths)
    assert flops.training(lengths, 3, train_indexers=True) == 3 * flops.forward(lengths, 3)
    assert flops.training(lengths, 3) == 3 * flops.forward(lengths, 3) - 2 * indexers
    extra = flops.forward(lengths, 3, prediction_depths=2) - flops.forward(lengths, 3)
    one = attention_cost(sparse(True), HIDDEN) + indexer_cost(sparse(True), HIDDEN)
    one += Cost(token=2 * 2 * HIDDEN * HIDDEN + mlp_flops(MLP, HIDDEN))
    trained = flops.training(lengths, 3, prediction_depths=2) - flops.training(lengths, 3)
    with_indexers = flops.training(lengths, 3, 2, train_indexers=True) - 3 * flops.forward(lengths, 3)
    assert with_indexers == 3 * extra - 2 * 3 * 2 * HIDDEN * VOCAB
    assert trained == with_indexers - 2 * 2 * indexers, "the prediction layer's own indexer is frozen as well"
    assert extra == 2 * (sum(one.of(length, 7) for length in lengths) + 3 * 2 * HIDDEN * VOCAB)


def test_from_megatrons_arguments():
    flags = "--num-layers 2 --hidden-size 40 --num-attention-heads 6 --kv-channels 16 --group-query-attention "
    flags += "--num-query-groups 2 --ffn-hidden-size 72 --swiglu --disable-bias-linear --vocab-size 99"
    args = shape_args(flags.split())
    expected = ModelFlops.of(model(*[LayerShape(GROUPED, MLP, False)] * 2))
    assert flops_of_sequences([5, 17], args) == [expected.forward([5]), expected.forward([17])]
    with pytest.raises(ShapeError, match="--vocab-size"):
        flops_of_sequences([5], shape_args(flags.split()[:-2]))


def test_glm52_by_hand():
    """One sequence of 32,768 tokens: 2 x 39 billion active parameters a token, sparse attention and 21 indexers."""
    from tests.unit.plan.test_parameters import _driver

    flops = ModelFlops.of(ModelShape.from_args(_driver("glm5.2-744B-A40B")))
    length, topk = 32_768, 2048
    assert flops.topk == topk
    attention = 78 * naive_pairs(length, topk) * 2 * 64 * (576 + 512)
    assert flops.decoder.of(length, topk) - flops.decoder.token * length == attention
    indexers = flops.indexers.pair // (2 * 32 * 129)
    assert 0 < indexers < 78 / 3
    assert flops.forward([length]) == pytest.approx(length * 2 * 39e9 + attention, rel=0.15)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks(name, peak):
    assert peak_tflops(name) == peak
