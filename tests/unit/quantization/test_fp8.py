"""FP8 quantisation against its definition: bit for bit, at the edges, at zero, at 448."""

import numpy as np
import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8, ChannelFp8, TensorFp8
from tests.unit.quantization import reference

FORMATS = (BlockFp8(), BlockFp8((32, 64)), BlockFp8(power_of_two=True), ChannelFp8(), TensorFp8())


def weights(rows: int, columns: int, dtype=torch.bfloat16) -> torch.Tensor:
    """Values over many orders of magnitude, with a block of zeros, as a trained matrix never is but may become."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= 10.0 ** torch.randint(-6, 3, (rows, 1), generator=generator)
    weight[: rows // 3, : columns // 3] = 0
    return weight.to(dtype)


def test_reference_table_is_torchs():
    """The reference knows the format by itself; here it meets torch's for all finite values."""
    codes = torch.arange(127, dtype=torch.uint8)
    assert codes.view(torch.float8_e4m3fn).double().tolist() == reference.TABLE.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(130, 200), (64, 48), (1, 300), (129, 1)], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True], ids=["float", "ue8m0"])
def test_blocks_equal_the_definition(shape, power_of_two, dtype):
    """Every weight byte and every scale, with blocks cut off at both edges."""
    weight = weights(*shape, dtype=dtype)
    parts = BlockFp8((64, 48), power_of_two).quantize(weight)
    codes, scales = reference.fp8_blocks(weight.float().numpy(), 64, 48, power_of_two)
    np.testing.assert_array_equal(parts["weight_scale_inv"].numpy(), scales)
    np.testing.assert_array_equal(parts["weight"].view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("format, block", [(ChannelFp8(), (1, 200)), (TensorFp8(), (130, 200))])
def test_rows_and_tensors_are_blocks_of_that_shape(format, block):
    weight = weights(130, 200)
    parts = format.quantize(weight)
    codes, scales = reference.fp8_blocks(weight.float().numpy(), *block)
    np.testing.assert_array_equal(parts["weight_scale"].numpy().ravel(), scales.ravel())
    np.testing.assert_array_equal(parts["weight"].view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_error_is_at_most_half_a_step(format):
    """e4m3 has 3 bits of mantissa: 2^-4 of a value, or half of the smallest step (2^-10) times the scale near 0; then
    bfloat16 rounds once more. Power-of-two scales waste at most one bit of range, not of precision."""
    weight = weights(130, 200).float()
    parts = format.quantize(weight)
    restored = format.dequantize(parts).float()
    scale = parts[format.parts[1]].max() if isinstance(format, TensorFp8) else parts[format.parts[1]]
    if isinstance(format, BlockFp8):
        bm, bn = format.block_size
        scale = scale.repeat_interleave(bm, 0)[:130].repeat_interleave(bn, 1)[:, :200]
    bound = torch.maximum(weight.abs() * 2**-4, scale * 2**-10) * (1 + 2**-8) + restored.abs() * 2**-8
    assert ((restored - weight).abs() <= bound).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_zeros_stay_zeros_with_a_finite_scale(format):
    """A block of zeros once had the scale 0, its weights became 0 / 0 and the engine answered with nan."""
    parts = format.quantize(torch.zeros(130, 200, dtype=torch.bfloat16))
    scale = parts[format.parts[1]]
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert not parts["weight"].view(torch.uint8).any()
    assert not format.dequantize(parts).any()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_absmax_of_448_is_exact(format):
    """Scale 1, and the largest value must not round up to what e4m3 has no number for (it has nan there)."""
    weight = torch.ones(130, 200)
    weight[::2] = -448.0
    weight[1::2, ::2] = 448.0
    parts = format.quantize(weight)
    assert (parts[format.parts[1]] == 1).all()
    assert torch.equal(format.dequantize(parts).float(), weight)


def test_largest_of_a_block_never_becomes_nan():
    """absmax / (absmax / 448) may be a little more than 448 in float32."""
    absmax = torch.rand(20000, 1, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.isfinite(ChannelFp8().quantize(absmax)["weight"].float()).all()


def test_ue8m0_scales_are_the_next_powers_of_two():
    plain = BlockFp8((16, 16)).quantize(weights(130, 200))["weight_scale_inv"]
    rounded = BlockFp8((16, 16), power_of_two=True).quantize(weights(130, 200))["weight_scale_inv"]
    mantissa, _ = torch.frexp(rounded)
    assert (mantissa == 0.5).all()
    assert (rounded >= plain).all() and (rounded < 2 * plain).all()
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.to(torch.float8_e8m0fnu).float(), rounded, rtol=0, atol=0)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_inf_and_nan_are_refused(format, value):
    weight = torch.ones(130, 200, dtype=torch.bfloat16)
    weight[129, 199] = value
    with pytest.raises(ValueError, match="inf or nan"):
        format.quantize(weight)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_meta_tensors_tell_shapes_and_dtypes(format):
    """Conversions are planned from headers; the plan must be what comes out."""
    for shape in ((130, 200), (256, 384)):
        real = format.quantize(torch.randn(shape, dtype=torch.float32))
        planned = format.quantize(torch.empty(shape, device="meta"))
        assert list(planned) == list(real) == list(format.parts)
        assert all((planned[n].shape, planned[n].dtype) == (real[n].shape, real[n].dtype) for n in real)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_scales_of_another_shape_are_refused(format):
    """A block size that is not the checkpoint's would multiply every weight by a wrong scale."""
    parts = format.quantize(weights(130, 200))
    parts[format.parts[1]] = torch.ones(3, 7)
    with pytest.raises(ValueError, match="scale"):
        format.dequantize(parts)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_gpu_and_cpu_agree_bit_for_bit(format):
    weight = weights(1000, 520)
    parts, on_gpu = format.quantize(weight), format.quantize(weight.cuda())
    for name, tensor in parts.items():
        assert torch.equal(tensor.view(torch.uint8), on_gpu[name].cpu().view(torch.uint8))
    assert torch.equal(format.dequantize(parts), format.dequantize(on_gpu).cpu())
