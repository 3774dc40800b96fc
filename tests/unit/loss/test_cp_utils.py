"""Zigzag slices reassemble to the whole sample, and reductions do not depend on how samples are split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.cp_utils import (
    ParallelState,
    canonical_length,
    get_logits_and_tokens_offset_with_cp,
    get_sum_of_sample_mean,
    slice_log_prob_with_cp,
    slice_with_cp,
)

lengths = st.tuples(st.integers(1, 9), st.integers(0, 40))  # prompt, response


def ranks(size):
    return [ParallelState(cp_rank=r, cp_size=size) for r in range(size)]


@settings(deadline=None)
@given(lengths, st.sampled_from([1, 2, 4]))
def test_every_response_token_has_one_rank_and_its_logit_just_before_it(sizes, cp):
    n, m = sum(sizes), sizes[1]
    covered = []
    for rank in ranks(cp):
        chunk, chunks, logits, tokens = get_logits_and_tokens_offset_with_cp(n, m, rank)
        assert chunk == -(-n // (2 * cp))
        assert chunks == tuple((k * chunk, (k + 1) * chunk) for k in (rank.cp_rank, 2 * cp - 1 - rank.cp_rank))
        for (start, stop), (a, b), (c, d) in zip(chunks, logits, tokens, strict=True):
            if (a, b) == (0, 0):
                assert (c, d) == (0, 0)
                continue
            assert start <= a < b <= stop and (c, d) == (a + 1, b + 1)
            covered += range(c, d)
        assert canonical_length(n, m, rank) == sum(b - a for a, b in logits)
    assert sorted(covered) == list(range(n - m, n))


@settings(deadline=None)
@given(lengths, st.sampled_from([1, 2, 4]))
def test_slices_of_all_ranks_hold_every_value_once(sizes, cp):
    n, m = sum(sizes), sizes[1]
    whole = torch.arange(1, m + 1)
    parts = [slice_log_prob_with_cp(whole, n, m, rank) for rank in ranks(cp)]
    as_lists = [slice_log_prob_with_cp(whole.tolist(), n, m, rank) for rank in ranks(cp)]
    assert [part.tolist() for part in parts] == as_lists
    assert sorted(sum(as_lists, [])) == whole.tolist()


@settings(deadline=None)
@given(st.integers(1, 50), st.sampled_from([2, 4]), st.booleans())
def test_zigzag_chunks_reassemble_with_padding_at_the_end(n, cp, use_function):
    tokens = torch.arange(n * 3).view(n, 3)
    pad = (lambda x, k: torch.nn.functional.pad(x, (0, 0, 0, k), value=-7)) if use_function else -7
    parts = [slice_with_cp(tokens, pad, rank).chunk(2) for rank in ranks(cp)]
    whole = torch.cat([p[0] for p in parts] + [p[1] for p in reversed(parts)])
    assert torch.equal(whole[:n], tokens) and (whole[n:] == -7).all()
    assert len(whole) == 2 * cp * -(-n // (2 * cp))
    assert slice_with_cp(tokens, pad, ParallelState()) is tokens


@settings(deadline=None)
@given(
    st.lists(lengths, min_size=1, max_size=7),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_reducer_equals_the_naive_sum_over_any_split(sizes, cp, per_token, siblings, seed):
    """Any micro-batches, any CP: shares add up to the definition, with denominators of whole rollouts."""
    g = torch.Generator().manual_seed(seed)
    total, response = [sum(s) for s in sizes], [s[1] for s in sizes]
    masks = [(torch.rand(m, generator=g) < 0.6).int() for m in response]
    values = [torch.randn(m, generator=g) for m in response]
    rollout = [i // 2 if siblings else i for i in range(len(sizes))]
    denominators = [sum(int(masks[j].sum()) for j in range(len(sizes)) if rollout[j] == r) for r in rollout]
    expected = sum(
        float((v.double() * k).sum()) / (1 if per_token else max(d, 1))
        for v, k, d in zip(values, masks, denominators, strict=True)
    )
    got, start = 0.0, 0
    while start < len(sizes):
        stop = min(start + int(torch.randint(1, 4, (), generator=g)), len(sizes))
        for rank in ranks(cp):
            part = slice(start, stop)
            reduce = get_sum_of_sample_mean(
                total[part],
                response[part],
                masks[part],
                denominators[part] if siblings else None,
                per_token,
                parallel=rank,
            )
            zipped = zip(values[part], total[part], response[part], strict=True)
            got += float(reduce(torch.cat([slice_log_prob_with_cp(v, n, m, rank) for v, n, m in zipped])))
        start = stop
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_wrong_lengths_are_named():
    with pytest.raises(ValueError, match="3 per-token values for a response of 4 tokens"):
        slice_log_prob_with_cp([0.0] * 3, 9, 4)
    with pytest.raises(ValueError, match="a prompt must precede it"):
        get_logits_and_tokens_offset_with_cp(4, 4)
    reduce = get_sum_of_sample_mean([5], [3], [torch.ones(3)])
    with pytest.raises(ValueError, match="for 3 local response tokens"):
        reduce(torch.ones(3, 1))
