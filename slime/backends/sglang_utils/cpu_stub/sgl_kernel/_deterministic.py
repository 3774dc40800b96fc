"""`--enable-deterministic-inference` on the CPU: a request's tokens and log-probs do not depend on other requests.

In SGLang 0.5.17 this mode is made of Triton kernels for GPUs. Three things are put in their place:
- products in blocks of a fixed number of rows, because BLAS picks its kernel, and with it the order of additions, by
  the number of rows;
- the seeded sampler in plain torch (the original hashes with Triton and compiles itself with a C++ compiler);
- torch_native among the attention backends that are allowed, the prefix cache included: see `_attention`.

Where elementwise functions are padded to a multiple of 32: torch's vector loop rounds exp and log differently from
the scalar loop that takes the remainder.
"""

import types

import torch
from torch import Tensor

ROWS = 16
_LANES = 32
_original_bmm = torch.bmm
_library = None


def fix_server_args(module: types.ModuleType) -> None:
    module.add_deterministic_attention_backend_choices(["torch_native"])
    module.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def fix_batch_invariant_mode(module: types.ModuleType) -> None:
    module.enable_batch_invariant_mode = enable_fixed_row_blocks


def fix_sampler(module: types.ModuleType) -> None:
    def sampling_from_probs_torch(
        probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        if sampling_seed is None:
            return torch.multinomial(probs, num_samples=1).view(-1).to(torch.int32)
        return seeded_choice(_log(probs.double()), sampling_seed, positions).view(-1).to(torch.int32)

    module.sampling_from_probs_torch = sampling_from_probs_torch
    module.multinomial_with_seed = seeded_choice


def enable_fixed_row_blocks(enable_bmm: bool = True) -> None:
    """From now on mm, addmm and torch.bmm compute ROWS rows at a time on the CPU, in this process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("aten::mm", mm_in_blocks, "CPU")
    _library.impl("aten::addmm", _addmm_in_blocks, "CPU")
    torch.bmm = bmm_in_blocks


def mm_in_blocks(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, [n, k] x [k, m]; a row's bits depend on that row and b alone."""
    rows, inner = a.shape
    padded = torch.nn.functional.pad(a, (0, 0, 0, -rows % ROWS)).view(-1, ROWS, inner)
    if padded.shape[0] == 0:
        return a.new_zeros(0, b.shape[1])
    product = _original_bmm(padded, b.expand(padded.shape[0], -1, -1))
    return product.view(-1, b.shape[1])[:rows]


def _addmm_in_blocks(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = mm_in_blocks(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta) if beta != 0 else product


def bmm_in_blocks(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """[batch, n, k] x [batch, k, m], written to `out` if given; n is cut into blocks of ROWS rows."""
    rows = a.shape[1]
    padded = torch.nn.functional.pad(a, (0, 0, 0, -rows % ROWS))
    blocks = [_original_bmm(block, b) for block in padded.split(ROWS, dim=1)]
    product = torch.cat(blocks, dim=1)[:, :rows]
    return product if out is None else out.copy_(product)


def seeded_choice(log_weights: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draws one column of each row with probability proportional to exp(log_weights): the Gumbel-max trick.

    log_weights: [n, m]. seed, positions: [n] integers; the same (seed, position) draws the same noise. Returns [n, 1].
    """
    columns = log_weights.shape[1]
    noise_columns = -(-columns // _LANES) * _LANES
    hashed = _murmur3(seed.long(), positions.long(), torch.arange(noise_columns))
    uniform = (hashed.double() + 0.5) / 2**32  # strictly inside (0, 1)
    gumbel = uniform.log_().neg_().log_().neg_()
    return torch.argmax(log_weights.double() + gumbel[:, :columns], dim=1, keepdim=True)


def _murmur3(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bit, A. Appleby) of the 16 bytes (seed, position, column). [n], [n], [m] -> [n, m] int64.

    int64 products wrap around, which leaves the low 32 bits right.
    """
    low = 0xFFFFFFFF
    state = torch.zeros_like(seed)[:, None]
    for word in (seed[:, None] & low, (seed[:, None] >> 32) & low, positions[:, None] & low, columns[None, :]):
        word = (word * 0xCC9E2D51) & low
        word = ((word << 15) | (word >> 17)) & low
        word = (word * 0x1B873593) & low
        state = state ^ word
        state = ((state << 13) | (state >> 19)) & low
        state = (state * 5 + 0xE6546B64) & low
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & low
    return state ^ (state >> 16)


def _log(x: Tensor) -> Tensor:
    """log of [n, m] whose rounding does not depend on where in the tensor an element stands."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % _LANES), value=1.0).log_()[:, : x.shape[1]]
