"""The CPU stand-in: attention against a float64 loop, products and sampling that do not depend on the batch."""

import subprocess
import sys
from collections import Counter

import pytest
import torch

from slime.backends.sglang_utils.server_args import CPU_STUB


@pytest.fixture(scope="module")
def stub():
    """The stub's modules, imported without running its package (which adapts a server process)."""
    package = str(CPU_STUB / "sgl_kernel")
    sys.path.insert(0, package)
    try:
        import _attention
        import _deterministic
    finally:
        sys.path.remove(package)
    return {"attention": _attention, "deterministic": _deterministic}


@pytest.fixture(autouse=True)
def one_thread():
    """As in a server process; a second thread may split a reduction elsewhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def naive_attention(query, k_cache, v_cache, tables, query_lens, prefix_lens, scale, window):
    """One query token after the other in float64. query [T, H, D] -> [T, H, Dv]."""
    result, row = [], 0
    for table, new, prefix in zip(tables, query_lens.tolist(), prefix_lens.tolist(), strict=True):
        for position in range(prefix, prefix + new):
            first = 0 if window is None else max(0, position - window)
            slots = table[first : position + 1].long()
            group = query.shape[1] // k_cache.shape[1]
            keys = k_cache[slots].double().repeat_interleave(group, 1)
            values = v_cache[slots].double().repeat_interleave(group, 1)
            weights = torch.softmax(torch.einsum("hd,khd->hk", query[row].double() * scale, keys), -1)
            result.append(torch.einsum("hk,khd->hd", weights, values))
            row += 1
    return torch.stack(result)


def paged_batch(seed, heads, kv_heads, dim, v_dim, requests=7, longest=70, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query_lens = torch.randint(1, longest, (requests,), generator=generator)
    prefix_lens = torch.randint(0, 150, (requests,), generator=generator)
    prefix_lens[0], query_lens[1] = 0, 1
    tables = torch.stack([torch.randperm(2000, generator=generator)[:300] for _ in range(requests)]).int()
    k_cache = torch.randn(2000, kv_heads, dim, generator=generator).to(dtype)
    v_cache = torch.randn(2000, kv_heads, v_dim, generator=generator).to(dtype)
    query = torch.randn(int(query_lens.sum()), heads, dim, generator=generator).to(dtype)
    return query, k_cache, v_cache, tables, query_lens, prefix_lens


def run(stub, query, k_cache, v_cache, tables, query_lens, prefix_lens, fixed, scale=None, window=None):
    attention = stub["attention"]
    layout = attention.block_layout(query_lens, prefix_lens, fixed)
    out = query.new_full((query.shape[0], query.shape[1], v_cache.shape[2]), torch.nan)
    return attention.block_attention(query, k_cache, v_cache, tables, layout, scale, window, out)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("window", [None, 0, 7, 100])
@pytest.mark.parametrize("shape", [(4, 2, 32, 32), (6, 1, 48, 40), (3, 3, 20, 24)], ids=["gqa", "latent", "mha"])
def test_attention_equals_a_naive_loop(stub, fixed, window, shape):
    batch = paged_batch(1, *shape)
    expected = naive_attention(*batch, shape[2] ** -0.5, window)
    assert (run(stub, *batch, fixed, window=window).double() - expected).abs().max() < 2e-6


def test_decode_batches_equal_a_naive_loop(stub):
    query, k_cache, v_cache, tables, _, prefix_lens = paged_batch(2, 4, 2, 32, 32)
    batch = (query[: len(prefix_lens)], k_cache, v_cache, tables, torch.ones_like(prefix_lens), prefix_lens)
    expected = naive_attention(*batch, 0.3, None)
    for fixed in (False, True):
        assert (run(stub, *batch, fixed, scale=0.3).double() - expected).abs().max() < 2e-6


def test_memory_bound_does_not_change_the_result(stub, monkeypatch):
    batch = paged_batch(3, 4, 2, 32, 16)
    whole = run(stub, *batch, True)
    monkeypatch.setattr(stub["attention"], "_MAX_ELEMENTS", 10_000)
    assert torch.equal(run(stub, *batch, True), whole)


def test_bfloat16_caches_are_read_in_float32(stub):
    batch = paged_batch(4, 4, 2, 32, 16, dtype=torch.bfloat16)
    expected = naive_attention(*batch, 32**-0.5, None)
    result = run(stub, *batch, False)
    assert result.dtype == torch.bfloat16
    assert (result.double() - expected).abs().max() < 2e-2


@pytest.mark.parametrize("shape", [(4, 2, 32, 32), (5, 5, 24, 20), (6, 1, 48, 40)])
def test_fixed_blocks_ignore_neighbours_and_history(stub, shape):
    """Bits of a request alone, with any part of it already cached, equal its bits in the batch."""
    query, k_cache, v_cache, tables, query_lens, prefix_lens = paged_batch(5, *shape)
    together = run(stub, query, k_cache, v_cache, tables, query_lens, prefix_lens, True)
    first = torch.cumsum(query_lens, 0) - query_lens
    for index, length in enumerate(query_lens.tolist()):
        for cached in {0, 1, length // 2, length - 1} - {length}:
            rows = slice(int(first[index]) + cached, int(first[index]) + length)
            new, prefix = torch.tensor([length - cached]), prefix_lens[index : index + 1] + cached
            alone = run(stub, query[rows], k_cache, v_cache, tables[index : index + 1], new, prefix, True)
            assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(128, 42), (100, 77), (512, 1000), (2048, 512)])
def test_rows_of_a_product_ignore_each_other(stub, inner, columns, dtype):
    generator = torch.Generator().manual_seed(inner)
    a = torch.randn(150, inner, generator=generator).to(dtype)
    b = torch.randn(columns, inner, generator=generator).to(dtype).t()
    product = stub["deterministic"].mm_in_blocks(a, b)
    torch.testing.assert_close(product, a @ b, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-3)
    for rows in (1, 2, 15, 16, 17, 149):
        chosen = torch.randperm(150, generator=generator)[:rows]
        assert torch.equal(stub["deterministic"].mm_in_blocks(a[chosen], b), product[chosen])


def test_rows_of_a_batched_product_ignore_each_other(stub):
    a, b = torch.randn(3, 40, 48), torch.randn(3, 48, 20)
    product = stub["deterministic"].bmm_in_blocks(a, b)
    torch.testing.assert_close(product, a @ b)
    assert torch.equal(stub["deterministic"].bmm_in_blocks(a[:, 7:8], b), product[:, 7:8])
    out = torch.full((40, 3, 20), torch.nan).transpose(0, 1)  # a view, as MLA attention passes
    assert stub["deterministic"].bmm_in_blocks(a, b, out=out) is out
    assert torch.equal(out, product)


def test_empty_products_have_the_right_shape(stub):
    assert stub["deterministic"].mm_in_blocks(torch.zeros(0, 5), torch.zeros(5, 7)).shape == (0, 7)


def murmur3_reference(words):
    """MurmurHash3 x86 32 of four little-endian words, with Python integers."""
    state, low = 0, 0xFFFFFFFF
    for word in words:
        word = word * 0xCC9E2D51 & low
        word = (word << 15 | word >> 17) & low
        state ^= word * 0x1B873593 & low
        state = ((state << 13 | state >> 19) * 5 + 0xE6546B64) & low
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & low
    state = (state ^ state >> 13) * 0xC2B2AE35 & low
    return state ^ state >> 16


def test_hash_equals_integer_arithmetic(stub):
    seeds, positions = [0, 1, 2**32 + 5, 2**62 + 3], [0, 7, 1000, 2**31]
    hashed = stub["deterministic"]._murmur3(torch.tensor(seeds), torch.tensor(positions), torch.arange(3))
    expected = [
        [murmur3_reference([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in range(3)]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected


def test_seeded_choice_follows_the_distribution_and_only_seed_and_position(stub):
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    n = 20_000
    seeds, positions = torch.arange(n) // 10, torch.arange(n) % 10
    draw = stub["deterministic"].seeded_choice
    log_weights = probabilities.log().expand(n, -1)
    choice = draw(log_weights, seeds, positions).view(-1)
    counts = Counter(choice.tolist())
    for column, probability in enumerate(probabilities.tolist()):
        assert abs(counts[column] / n - probability) < 4 * (probability * (1 - probability) / n) ** 0.5 + 1e-9
    order = torch.randperm(n)[:333]
    assert torch.equal(draw(log_weights[order], seeds[order], positions[order]).view(-1), choice[order])


def test_any_kernel_name_imports_and_none_can_be_called():
    """In a fresh process that finds the stub first, as a server does."""
    code = """
import sgl_kernel, sgl_kernel.quantization.gguf as deep
from sgl_kernel import rmsnorm, scalar_types
scalar_types.uint4b8.anything
assert not hasattr(sgl_kernel, "__wrapped__")
for kernel in (rmsnorm, deep.dequantize):
    try:
        kernel(1)
    except NotImplementedError as error:
        print(error)
"""
    env = {"PYTHONPATH": str(CPU_STUB), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"sgl_kernel.{name} is a GPU kernel; this server runs on the CPU, which has none"
        for name in ("rmsnorm", "quantization.gguf.dequantize")
    ]
