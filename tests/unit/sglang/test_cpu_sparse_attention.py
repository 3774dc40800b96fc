"""Sparse attention of the CPU engine: which tokens are chosen, and attention to those alone, against naive loops."""

import sys
from types import SimpleNamespace

import pytest
import torch

from slime.backends.sglang_utils.server_args import CPU_STUB

HEADS, DIM, TOPK = 5, 12, 9  # of the indexer


@pytest.fixture(scope="module")
def stub():
    """The stub's modules, imported without running its package (which adapts a server process)."""
    package = str(CPU_STUB / "sgl_kernel")
    sys.path.insert(0, package)
    try:
        import _attention
        import _choice
    finally:
        sys.path.remove(package)
    return SimpleNamespace(attention=_attention, choice=_choice)


@pytest.fixture(autouse=True)
def one_thread():
    """As in a server process; a second thread may split a reduction elsewhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Batch:
    """Ragged requests with prefixes in a paged cache, and what indexer and attention compute from."""

    def __init__(self, seed, query_lens=(30, 1, 64, 7, 1), prefix_lens=(0, 0, 45, 3, 90)):
        draw = torch.Generator().manual_seed(seed)
        self.query_lens, self.prefix_lens = torch.tensor(query_lens), torch.tensor(prefix_lens)
        tokens, slots = sum(query_lens), 1500
        self.tables = torch.stack([torch.randperm(slots, generator=draw)[:200] for _ in query_lens]).int()
        self.query = torch.randn(tokens, HEADS, DIM, generator=draw)
        self.weights = torch.randn(tokens, HEADS, generator=draw)
        self.keys = torch.randn(slots, DIM, generator=draw)
        self.main_query = torch.randn(tokens, 4, 20, generator=draw)
        self.latents = torch.randn(slots, 1, 20, generator=draw)

    def rows(self):
        """(token, slots of the tokens up to and with it) for every query token."""
        token = 0
        for table, new, prefix in zip(self.tables, self.query_lens.tolist(), self.prefix_lens.tolist(), strict=True):
            for position in range(prefix, prefix + new):
                yield token, table[: position + 1].long()
                token += 1

    def request(self, index, cached=0):
        """This request alone, its first `cached` new tokens being in the cache already; and its rows here."""
        first = int(self.query_lens[:index].sum()) + cached
        rows = slice(first, int(self.query_lens[: index + 1].sum()))
        alone = Batch.__new__(Batch)
        alone.query_lens = self.query_lens[index : index + 1] - cached
        alone.prefix_lens = self.prefix_lens[index : index + 1] + cached
        alone.tables, alone.keys, alone.latents = self.tables[index : index + 1], self.keys, self.latents
        alone.query, alone.weights, alone.main_query = self.query[rows], self.weights[rows], self.main_query[rows]
        return alone, rows

    def choose(self, stub, fixed, topk=TOPK):
        layout = stub.attention.block_layout(self.query_lens, self.prefix_lens, fixed)
        return stub.choice.choose_tokens(self.query, self.weights, self.keys, self.tables, layout, topk)

    def attend(self, stub, chosen, fixed):
        layout = stub.attention.block_layout(self.query_lens, self.prefix_lens, fixed)
        out = self.main_query.new_full((len(self.main_query), 4, 16), torch.nan)
        values = self.latents[..., :16]
        return stub.attention.block_attention(
            self.main_query, self.latents, values, self.tables, layout, 0.3, None, out, chosen
        )


def naive_choice(batch, topk):
    """One query token after the other in float64, ties by a stable sort of Python."""
    chosen = torch.full((len(batch.query), topk), -1, dtype=torch.int32)
    for token, slots in batch.rows():
        products = torch.relu(batch.keys[slots].double() @ batch.query[token].double().T)
        scores = (products @ batch.weights[token].double()).tolist()
        best = sorted(range(len(scores)), key=lambda position: -scores[position])[:topk]
        chosen[token, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return chosen


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("topk", [1, TOPK, 500])
def test_choice_equals_a_naive_loop(stub, fixed, topk):
    batch = Batch(1)
    assert torch.equal(batch.choose(stub, fixed, topk), naive_choice(batch, topk))


def test_equal_scores_choose_the_earlier_token(stub):
    """Scores of 0 are common: every head's product may be negative."""
    scores = torch.tensor([[0.0, 1.0, 0.0, -0.0, 1.0, -torch.inf], [-torch.inf] * 6])
    assert stub.choice.highest(scores, 4).tolist() == [[1, 4, 0, 2], [-1] * 4]
    batch = Batch(2)
    batch.keys[:] = batch.keys[0]
    expected = torch.arange(TOPK, dtype=torch.int32)
    for token, slots in batch.rows():
        count = min(TOPK, len(slots))
        assert torch.equal(batch.choose(stub, True)[token, :count], expected[:count])


@pytest.mark.parametrize("fixed", [False, True])
def test_attention_sees_the_chosen_tokens_alone(stub, fixed):
    batch = Batch(3)
    chosen = batch.choose(stub, fixed)
    result = batch.attend(stub, chosen, fixed)
    for token, slots in batch.rows():
        seen = batch.latents[slots[chosen[token][chosen[token] >= 0].long()], 0].double()
        weights = torch.softmax(batch.main_query[token].double() @ seen.T * 0.3, -1)
        assert (result[token].double() - weights @ seen[:, :16]).abs().max() < 2e-6


def test_choosing_everything_is_dense_attention(stub):
    """Bit for bit: a request of at most index_topk tokens does not notice the indexer."""
    batch = Batch(4)
    assert torch.equal(batch.attend(stub, batch.choose(stub, True, 200), True), batch.attend(stub, None, True))


def test_memory_bound_does_not_change_the_result(stub, monkeypatch):
    batch = Batch(5)
    chosen = batch.choose(stub, True)
    result = batch.attend(stub, chosen, True)
    for module in (stub.attention, stub.choice):
        monkeypatch.setattr(module, "_MAX_ELEMENTS", 3000)
    assert torch.equal(batch.choose(stub, True), chosen)
    assert torch.equal(batch.attend(stub, chosen, True), result)


def test_fixed_blocks_ignore_neighbours_and_history(stub):
    """Choice and output of a request alone, with any part of it in the cache, have the bits they have in the batch."""
    batch = Batch(6)
    chosen = batch.choose(stub, True)
    result = batch.attend(stub, chosen, True)
    for index, length in enumerate(batch.query_lens.tolist()):
        for cached in {0, 1, length // 2, length - 1} - {length}:
            alone, rows = batch.request(index, cached)
            assert torch.equal(alone.choose(stub, True), chosen[rows])
            assert torch.equal(alone.attend(stub, chosen[rows], True), result[rows])


def test_bfloat16_is_scored_in_float32(stub):
    """Rounding products or their sum to bfloat16 would change the order of near scores."""
    batch = Batch(7)
    batch.query, batch.keys = batch.query.bfloat16(), batch.keys.bfloat16()
    assert torch.equal(batch.choose(stub, False), naive_choice(batch, TOPK))
