"""The gated delta rule and its causal convolution in plain torch, against token-by-token loops in float64."""

import pytest
import torch
import torch.nn.functional as F

from slime_plugins.models.gated_delta_rule import causal_conv1d, chunk_gated_delta_rule, l2norm

LENGTHS = (19, 1, 7, 40, 8, 3)  # shorter than a chunk, a whole number of chunks, several chunks and a rest
TOKENS = sum(LENGTHS)
HEADS, DIM, VALUE_DIM = 3, 5, 6


def _inputs(tokens=TOKENS, batch=1):
    """q, k, v, g, beta of a batch, queries and keys of length 1 as the layer gives them."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(batch, tokens, HEADS, *shape, generator=generator)

    q, k = (F.normalize(randn(DIM), dim=-1) for _ in range(2))
    return [q, k, randn(VALUE_DIM), -F.softplus(randn() + 1), randn().sigmoid()]


def _cu(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _recurrence(q, k, v, g, beta):
    """One sequence, token by token: q [t, heads, dk] .. -> [t, heads, dv]."""
    state, outs = torch.zeros(HEADS, DIM, VALUE_DIM, dtype=torch.float64), []
    for t in range(q.size(0)):
        state = g[t].exp()[:, None, None] * state
        missing = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * missing)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * DIM**-0.5)
    return torch.stack(outs)


def _reference(inputs, lengths):
    parts = zip(*(x[0].split(list(lengths)) for x in inputs), strict=True)
    return torch.cat([_recurrence(*part) for part in parts])[None]


@pytest.mark.parametrize("chunk_size", [4, 8, 64])
def test_packed_delta_rule_equals_the_recurrence(chunk_size):
    """Values and all five gradients of a ragged pack; a state must neither leak into the next sequence nor be lost
    between the chunks of one."""
    inputs = [x.requires_grad_() for x in _inputs()]
    out, state = chunk_gated_delta_rule(*inputs, cu_seqlens=_cu(LENGTHS), chunk_size=chunk_size)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = _reference(wide, LENGTHS)
    assert state is None and out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)

    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    for mine, reference in zip(grads, torch.autograd.grad((expected * weights).sum(), wide), strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=0, atol=2e-5)


def test_rows_of_a_batch_are_sequences_of_their_own():
    """Unpacked input is a batch of equally long sequences."""
    inputs = _inputs(tokens=11, batch=3)
    out, _ = chunk_gated_delta_rule(*inputs, chunk_size=4)
    expected = torch.cat([_reference([x[row : row + 1].double() for x in inputs], (11,)) for row in range(3)])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


def test_a_steep_decay_stays_finite():
    """exp(-g) of a strong decay overflows within a chunk: only differences that are not positive may be exponents."""
    inputs = [x.requires_grad_() for x in _inputs(tokens=64)]
    with torch.no_grad():
        inputs[3].fill_(-20.0)
    out, _ = chunk_gated_delta_rule(*inputs)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.isfinite(x).all() for x in (out, *grads))


def test_empty_sequences_are_nothing():
    """A pack may hold a sequence without tokens."""
    inputs = _inputs(tokens=9)
    with_empty, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=_cu((5, 0, 4)))
    without, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=_cu((5, 4)))
    torch.testing.assert_close(with_empty, without, rtol=0, atol=0)


def test_a_pack_must_be_covered():
    """Tokens behind the last sequence would otherwise silently join it or vanish."""
    with pytest.raises(ValueError, match="from 0 to 7 for 1 rows of 9 tokens"):
        chunk_gated_delta_rule(*_inputs(tokens=9), cu_seqlens=_cu((3, 4)))
    with pytest.raises(ValueError, match="states"):
        chunk_gated_delta_rule(*_inputs(tokens=9), output_final_state=True)


def test_half_precision_is_computed_in_float32():
    """bfloat16 inputs: the rounding of inputs and output is all that differs."""
    inputs = [x.bfloat16() for x in _inputs()]
    out, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=_cu(LENGTHS))
    expected = _reference([x.double() for x in inputs], LENGTHS)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_causal_convolution_of_a_pack(bias):
    """Each sequence for itself, also those shorter than the kernel; values and gradients."""
    channels, width = 7, 4
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, TOKENS, channels, generator=generator, requires_grad=True)
    weight = torch.randn(channels, width, generator=generator, requires_grad=True)
    offset = torch.randn(channels, generator=generator) if bias else None
    out, _ = causal_conv1d(x, weight, offset, activation="silu", cu_seqlens=_cu(LENGTHS))
    parts = []
    for part in x[0].split(list(LENGTHS)):
        padded = F.pad(part.T, (width - 1, 0))[None]
        parts.append(F.silu(F.conv1d(padded, weight[:, None], offset, groups=channels))[0].T)
    expected = torch.cat(parts)[None]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    weights = torch.randn(out.shape, generator=generator)
    grads = [torch.autograd.grad((y * weights).sum(), (x, weight)) for y in (out, expected)]
    for mine, reference in zip(*grads, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=2e-5)


def test_convolution_of_a_batch_without_activation():
    """Rows of a batch, fewer tokens than the kernel is wide; an unknown activation is refused."""
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(4))
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(5))
    out, _ = causal_conv1d(x, weight)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], groups=5).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="gelu"):
        causal_conv1d(x, weight, activation="gelu")


def test_l2norm():
    """x / sqrt(sum of squares + eps), in the input's dtype."""
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(6)).bfloat16()
    wide = x.double()
    expected = wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert l2norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(l2norm(x).double(), expected, rtol=2**-8, atol=0)
