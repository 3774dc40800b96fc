"""INT4 packing against its definition and against the compressed-tensors library that readers use."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.megatron_to_hf.processors.formats import describe_scheme
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4, pack, unpack
from tests.unit.quantization import reference


def weights(rows: int, columns: int, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    weight = torch.randn(rows, columns, generator=generator) * 0.03
    weight[rows // 2] = 0
    return weight.to(dtype)


@given(st.integers(1, 5), st.integers(1, 21), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_packing_is_lossless_for_every_width(rows, columns, seed):
    values = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed))
    words = pack(values)
    assert words.dtype == torch.int32
    np.testing.assert_array_equal(words.numpy(), reference.pack_nibbles(values.numpy()))
    assert torch.equal(unpack(words, columns).long(), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape, group", [((5, 96), 32), ((130, 48), 16), ((3, 128), 128)])
def test_symmetric_equals_the_definition(shape, group, dtype):
    weight = weights(*shape, dtype=dtype)
    parts = PackedInt4(group).quantize(weight)
    values, scales = reference.int4_groups(
        weight.float().numpy(), group, lambda scale: torch.tensor(scale).to(dtype).float().numpy()
    )
    np.testing.assert_array_equal(parts["weight_scale"].float().numpy(), scales)
    np.testing.assert_array_equal(parts["weight_packed"].numpy(), reference.pack_nibbles(values))
    assert parts["weight_shape"].tolist() == list(shape) and parts["weight_shape"].dtype == torch.int32
    assert parts["weight_scale"].dtype == dtype


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(13, 96), (130, 64)], ids=str)
def test_compressed_tensors_reads_the_same_weights(symmetric, shape):
    """The library that transformers loads with decompresses to our own bfloat16 values, bit for bit, from the config
    that goes with them; rows are no multiple of the 8 zero points in a word."""
    format = PackedInt4(32, symmetric)
    weight = weights(*shape)
    parts = format.quantize(weight)
    group = describe_scheme(format, [])["config_groups"]["group_0"]
    library = PackedQuantizationCompressor.decompress(dict(parts), QuantizationScheme.model_validate(group))
    assert torch.equal(library["weight"], format.dequantize(parts))


@pytest.mark.parametrize("symmetric", [True, False])
def test_error_is_at_most_half_a_step(symmetric):
    format = PackedInt4(32, symmetric)
    weight = weights(70, 96, torch.float32)
    parts = format.quantize(weight)
    restored = format.dequantize(parts).float()
    step = parts["weight_scale"].repeat_interleave(32, dim=1)
    # a rounded zero point shifts a range of 15 steps by up to half a step, at one end of it
    bound = (0.5 if symmetric else 1.0) * step * 1.001 + restored.abs() * 2**-8
    assert ((restored - weight).abs() <= bound).all()


def test_asymmetric_reaches_groups_far_from_zero():
    """Zero points are 0 to 15, so a range that leaves out 0 can have none: 5.0 to 6.0 once came back as 1.0."""
    weight = torch.linspace(5, 6, 64).view(2, 32)
    for each in (weight, -weight):
        restored = PackedInt4(32, symmetric=False).dequantize(PackedInt4(32, symmetric=False).quantize(each))
        assert ((restored.float() - each).abs() <= 0.5 * 6 / 15 + 0.05).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zeros_with_a_finite_scale(symmetric):
    format = PackedInt4(32, symmetric)
    parts = format.quantize(torch.zeros(9, 64, dtype=torch.bfloat16))
    assert (parts["weight_scale"] > 0).all() and torch.isfinite(parts["weight_scale"]).all()
    assert not format.dequantize(parts).any()


def test_columns_that_no_group_divides_are_named():
    with pytest.raises(ValueError, match=r"100 columns .* group size 32; sizes that fit: none"):
        PackedInt4(32).quantize(torch.zeros(4, 100))
    with pytest.raises(ValueError, match=r"sizes that fit: 16, 32$"):
        PackedInt4(64).quantize(torch.zeros(4, 96))


@pytest.mark.parametrize("symmetric", [True, False])
def test_inf_is_refused_and_meta_tells_shapes(symmetric):
    format = PackedInt4(32, symmetric)
    with pytest.raises(ValueError, match="inf or nan"):
        format.quantize(torch.full((2, 32), float("inf")))
    real, planned = format.quantize(weights(13, 64)), format.quantize(weights(13, 64).to("meta"))
    assert list(planned) == list(real) == list(format.parts)
    assert all((planned[n].shape, planned[n].dtype) == (real[n].shape, real[n].dtype) for n in real)


def test_parts_of_another_shape_are_refused():
    parts = PackedInt4(32).quantize(weights(13, 64))
    with pytest.raises(ValueError, match="weight_scale of a 13 x 64 weight"):
        PackedInt4(16).dequantize(parts)


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False])
def test_gpu_and_cpu_agree_bit_for_bit(symmetric):
    format = PackedInt4(32, symmetric)
    weight = weights(1000, 512)
    parts, on_gpu = format.quantize(weight), format.quantize(weight.cuda())
    assert all(torch.equal(tensor, on_gpu[name].cpu()) for name, tensor in parts.items())
    assert torch.equal(format.dequantize(parts), format.dequantize(on_gpu).cpu())
