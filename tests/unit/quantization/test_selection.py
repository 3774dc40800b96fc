"""Which weights are quantised: by module names as wholes, equally by the tools, the weight push and the engines."""

import json
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf.processors import quantize
from slime.backends.megatron_utils.megatron_to_hf.processors.formats import describe_scheme, parse_scheme
from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8, ChannelFp8, TensorFp8
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4
from slime.backends.megatron_utils.megatron_to_hf.processors.selection import (
    check_fused,
    is_known_linear,
    is_routed_expert,
    may_be_quantized,
    name_rule_matches,
    path_rule_matches,
)

LAYER = "model.layers.3."
# matrices [out, in] of the families: quantised ones, and ones that stay
QUANTIZED = {
    "attention": "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj",
    "mlp": "mlp.gate_proj mlp.up_proj mlp.down_proj",
    "glm4": "mlp.gate_up_proj",
    "moe": "mlp.experts.17.gate_proj mlp.experts.17.down_proj mlp.shared_experts.up_proj mlp.shared_expert.down_proj",
    "minimax": "block_sparse_moe.experts.0.w1 block_sparse_moe.experts.0.w2 block_sparse_moe.experts.0.w3",
    "mla": "self_attn.q_a_proj self_attn.q_b_proj self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj",
    "dsa": "self_attn.indexer.wq_b self_attn.indexer.wk",
    "hybrid": "linear_attn.in_proj_qkvz linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.out_proj",
}
KEPT = {
    "moe": "mlp.gate mlp.shared_expert_gate block_sparse_moe.gate",
    "dsa": "self_attn.indexer.weights_proj",
    "mtp": "eh_proj",
    "hybrid": "linear_attn.in_proj_ba linear_attn.in_proj_a linear_attn.in_proj_b",
}
OUTSIDE = (
    "model.embed_tokens",
    "lm_head",
    "model.visual.blocks.0.attn.o_proj",
    "mtp.fc",
    "model.mtp_layers.0.input_proj",
)


def split(table: dict[str, str]) -> list[str]:
    return [LAYER + leaf for leaves in table.values() for leaf in leaves.split()]


@pytest.mark.parametrize("module", split(QUANTIZED))
def test_linear_layers_are_quantised(module):
    assert may_be_quantized(module + ".weight", (256, 128)) and is_known_linear(module)


@pytest.mark.parametrize("module", [*split(KEPT), *OUTSIDE])
def test_routers_embeddings_and_gates_are_not(module):
    """in_proj_a and in_proj_ba stay, in_proj_qkvz does not: a substring would decide all three alike."""
    assert not may_be_quantized(module + ".weight", (256, 128)) and not is_known_linear(module)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("input_layernorm.weight", (256,)),
        ("linear_attn.conv1d.weight", (256, 1, 4)),
        ("self_attn.q_proj.bias", (256,)),
        ("linear_attn.A_log", (32,)),
        ("mlp.gate.e_score_correction_bias", (8,)),
        ("self_attn.q_proj.weight_scale_inv", (2, 2)),
    ],
)
def test_only_matrices_called_weight_are_quantised(name, shape):
    assert not may_be_quantized(LAYER + name, shape)


def test_routed_experts_are_told_from_shared_ones():
    assert is_routed_expert(LAYER + "mlp.experts.17.gate_proj")
    assert not is_routed_expert(LAYER + "mlp.shared_experts.gate_proj")
    assert not is_routed_expert(LAYER + "mlp.experts.gate_up_proj")


@pytest.mark.parametrize(
    "rule, module, path, name",
    [
        ("mlp.gate", LAYER + "mlp.gate", True, True),
        ("mlp.gate", LAYER + "mlp.gate_proj", False, False),
        ("model.layers.3", LAYER + "mlp.up_proj", True, False),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False, False),
        ("self_attn", LAYER + "self_attn.q_proj", True, False),
        ("lm_head", "lm_head", True, True),
        (r"re:.*\.mlp\.(gate|up)_proj$", LAYER + "mlp.up_proj", True, True),
        (r"re:mlp", LAYER + "mlp.up_proj", False, False),
    ],
)
def test_rules_match_whole_components(rule, module, path, name):
    """ "model.layers.1" must not reach layer 10. compressed-tensors lists parents without meaning their children."""
    assert path_rule_matches(rule, module) is path
    assert name_rule_matches(rule, module) is name


def test_half_of_a_fused_matrix_is_refused():
    attention = [LAYER + "self_attn." + leaf for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")]
    check_fused(attention[:3], attention[3:])
    with pytest.raises(ValueError, match=r"k_proj would stay as it is and .*q_proj be quantised"):
        check_fused(attention[:1], attention[1:2])


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def named_tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    modules = [*split(QUANTIZED), *split(KEPT), *OUTSIDE]
    matrices = [(module + ".weight", torch.randn(160, 96, generator=generator).bfloat16()) for module in modules]
    return [
        *matrices,
        (LAYER + "input_layernorm.weight", torch.ones(96)),
        (LAYER + "self_attn.q_proj.bias", torch.ones(160)),
    ]


def test_config_without_fmt_means_e4m3_and_its_exceptions_are_kept():
    """Checkpoints without "fmt" once ended in a KeyError. What the config names stays in bfloat16, and nothing else
    does: an engine has no bfloat16 place for a layer that its config does not name."""
    config = FP8_CONFIG | {"modules_to_not_convert": ["lm_head", "mlp.gate_up_proj", "model.layers.3.linear_attn"]}
    sent = dict(quantize(named_tensors(), config))
    kept = [module for module in split(QUANTIZED) if "linear_attn" in module or module.endswith("gate_up_proj")]
    assert len(kept) == 5
    for module in split(QUANTIZED):
        dtype = torch.bfloat16 if module in kept else torch.float8_e4m3fn
        assert sent[module + ".weight"].dtype == dtype, module
        assert (module + ".weight_scale_inv" in sent) is (module not in kept)
    for module in [*split(KEPT), *OUTSIDE]:
        assert sent[module + ".weight"].dtype == torch.bfloat16
    assert torch.equal(sent[LAYER + "self_attn.q_proj.bias"], torch.ones(160))


def test_quantised_tensors_are_those_of_the_format():
    """The push sends the bytes that the conversion tools write, in the order of the input."""
    for format in (BlockFp8((64, 32)), TensorFp8(), ChannelFp8(), PackedInt4(32)):
        config = describe_scheme(format, [])
        sent = list(quantize(named_tensors()[:2], config))
        expected = [
            (f"{name.removesuffix('weight')}{part}", tensor)
            for name, weight in named_tensors()[:2]
            for part, tensor in format.quantize(weight).items()
        ]
        assert [name for name, _ in sent] == [name for name, _ in expected]
        assert all(
            torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            for (_, a), (_, b) in zip(sent, expected, strict=True)
        )


def test_quantize_is_a_stream():
    """The push hands over whole models; nothing may be collected first."""
    taken = []

    def tensors():
        for name, tensor in named_tensors():
            taken.append(name)
            yield name, tensor

    stream = quantize(tensors(), FP8_CONFIG)
    assert not taken
    next(stream)
    assert len(taken) == 1


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "mxfp4"}, r"quant_method 'mxfp4' is not known; known: fp8, compressed-tensors"),
        ({}, "quant_method None"),
        (FP8_CONFIG | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8_CONFIG | {"activation_scheme": "static"}, "activation_scheme 'static'"),
        (FP8_CONFIG | {"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "compressed-tensors"}, "one config_group is understood, here are 0"),
    ],
)
def test_configs_that_are_not_understood_are_refused_at_once(config, message):
    with pytest.raises(ValueError, match=message):
        quantize([], config)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_bits": 8}, "pack-quantized int 8 group is not understood"),
        ({"type": "float"}, "pack-quantized float 4 group"),
        ({"strategy": "channel"}, "pack-quantized int 4 channel"),
        ({"actorder": "group"}, "actorder"),
    ],
)
def test_compressed_tensors_of_other_kinds_are_refused(change, message):
    """An 8-bit config was once taken for int4, and the engine got other weights."""
    config = describe_scheme(PackedInt4(32), [])
    config["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(ValueError, match=message):
        parse_scheme(config)
    config["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    with pytest.raises(ValueError, match="targets"):
        parse_scheme(config)


@pytest.mark.parametrize(
    "format", [BlockFp8(), BlockFp8((64, 32), True), TensorFp8(), ChannelFp8(), PackedInt4(64, False)]
)
def test_config_round_trip(format):
    scheme = parse_scheme(describe_scheme(format, ["lm_head"]))
    assert scheme.format == format and scheme.ignore == ("lm_head",)


def test_asymmetric_experts_and_quantised_input_are_refused_by_name():
    expert = (LAYER + "mlp.experts.0.up_proj.weight", torch.zeros(8, 32))
    with pytest.raises(ValueError, match=r"experts\.0\.up_proj\.weight: .*zero points"):
        list(quantize([expert], describe_scheme(PackedInt4(32, False), [])))
    twice = (LAYER + "mlp.up_proj.weight", torch.zeros(8, 32).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight is torch\.float8_e4m3fn"):
        list(quantize([twice], FP8_CONFIG))
    broken = (LAYER + "mlp.up_proj.weight", torch.full((8, 32), float("nan")))
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight: the weight holds inf or nan"):
        list(quantize([broken], FP8_CONFIG))


PUBLISHED = {
    "deepseek-v3": (BlockFp8(), "mlp.gate", "mlp.experts.3.up_proj"),
    "kimi-k2": (BlockFp8(), "mlp.gate", "self_attn.kv_b_proj"),
    "minimax-m2": (BlockFp8(), "block_sparse_moe.gate", "block_sparse_moe.experts.3.w1"),
    "kimi-k2-thinking": (PackedInt4(32), "self_attn.kv_b_proj", "mlp.experts.3.up_proj"),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configs_are_understood(model):
    """MiniMax-M2 calls e4m3 by torch's name for it."""
    format, kept, quantised = PUBLISHED[model]
    path = Path(__file__).resolve().parents[2] / "data" / "hf_configs" / f"{model}.json"
    config = json.loads(path.read_text())["quantization_config"]
    assert parse_scheme(config).format == format
    sent = dict(quantize([(f"{LAYER}{module}.weight", torch.zeros(128, 128)) for module in (kept, quantised)], config))
    assert sent[f"{LAYER}{kept}.weight"].dtype == torch.float32
    assert f"{LAYER}{quantised}.{format.parts[1]}" in sent
