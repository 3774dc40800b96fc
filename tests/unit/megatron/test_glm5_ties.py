"""Which of equally scored tokens sparse attention chooses, on both of Megatron's paths, and how often it is asked."""

import dataclasses
import importlib.util
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.glm5_layer import CHOOSING, TINY, build_attention, choice_of, make_config, packed, start_alone

REPOSITORY = Path(__file__).parents[3]
HEADS, DIM = 3, 5


@pytest.fixture(scope="module", autouse=True)
def alone():
    start_alone("cpu")
    from slime.backends.megatron_utils import indexer_ties

    indexer_ties.install("none")
    yield
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def ties():
    from slime.backends.megatron_utils.indexer_ties import TIES

    TIES.take()
    return TIES


@pytest.fixture(scope="module")
def engines_choice():
    """`highest` of the engine on the CPU, whose package is importable in its own processes only."""
    path = REPOSITORY / "slime/backends/sglang_utils/cpu_stub/sgl_kernel/_choice.py"
    spec = importlib.util.spec_from_file_location("engines_choice", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.highest


def naive(scores: list[list[float]], topk: int) -> tuple[list[set[int]], list[bool]]:
    """Of each row the chosen columns, and whether the best one left out equals the last one chosen; one by one."""
    chosen, tied = [], []
    for row in scores:
        order = sorted((-score, column) for column, score in enumerate(row) if score != -torch.inf)
        chosen.append({column for _, column in order[:topk]})
        tied.append(len(order) > topk and order[topk - 1][0] == order[topk][0])
    return chosen, tied


def as_sets(chosen: torch.Tensor) -> list[set[int]]:
    rows = [[column for column in row if column >= 0] for row in chosen.tolist()]
    assert all(len(row) == len(set(row)) for row in rows)
    return [set(row) for row in rows]


def small_integers(
    lengths: list[int], seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[float]]]:
    """(q [t, 1, heads, dim], k [t, 1, dim], weights [t, 1, heads]) of a packed row, and its masked scores. Exact in
    bfloat16 too; relu leaves nothing of many pairs, and what remains is a small whole number."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).float()

    tokens = sum(lengths)
    q, k, weights = draw(-1, 1, tokens, 1, HEADS, DIM), draw(-1, 1, tokens, 1, DIM), draw(-1, 2, tokens, 1, HEADS)
    scores = [[-torch.inf] * tokens for _ in range(tokens)]
    for start, length in zip(starts_of(lengths), lengths, strict=True):
        for t in range(start, start + length):
            for j in range(start, t + 1):
                heads = [max(float(q[t, 0, h] @ k[j, 0]), 0.0) for h in range(HEADS)]
                scores[t][j] = sum(float(weights[t, 0, h]) * heads[h] for h in range(HEADS))
    return q, k, weights, scores


def starts_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def bounds(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """First key and the one behind the last of each query of a packed row, int64 [t]."""
    starts = torch.repeat_interleave(torch.tensor(starts_of(lengths)), torch.tensor(lengths))
    return starts, torch.arange(sum(lengths)) + 1


@settings(max_examples=120, deadline=None)
@given(
    scores=st.integers(1, 9).flatmap(
        lambda keys: st.lists(
            st.lists(st.sampled_from([-torch.inf, -1.0, -0.0, 0.0, 1.0, 2.0]), min_size=keys, max_size=keys),
            min_size=1,
        )
    ),
    topk=st.integers(1, 10),
    shuffled=st.randoms(use_true_random=False),
)
def test_among_equals_the_lower_position_is_chosen(engines_choice, scores, topk, shuffled):
    """Whatever equals were chosen first, and in whatever order: a loop and the engine agree with what comes out."""
    from slime.backends.megatron_utils.indexer_ties import prefer_lower_positions

    table = torch.tensor(scores)
    k = min(topk, table.size(1))
    order = list(range(table.size(1)))
    shuffled.shuffle(order)  # a choice among equals like any other: the highest of the shuffled columns
    values, picked = table[:, order].topk(k, sorted=False)
    chosen = torch.tensor(order)[picked].masked_fill(values == -torch.inf, -1)
    tied = prefer_lower_positions(table, values, chosen)
    wanted, wanted_tied = naive(scores, topk)
    assert as_sets(chosen) == wanted == as_sets(engines_choice(table, topk))
    assert tied.tolist() == wanted_tied
    kept = torch.where(chosen < 0, -torch.inf, table.gather(1, chosen.clamp(min=0)))
    assert torch.equal(kept, values)  # values still belong to the tokens beside them


@pytest.mark.parametrize("seed", range(4))
def test_in_plain_torch(ties, seed):
    """The function that Megatron's layers and its indexer loss call, on a packed row."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    lengths = [13, 2, 9, 21]
    q, k, weights, scores = small_integers(lengths, seed)
    starts, ends = bounds(lengths)
    real = torch.arange(sum(lengths)) % 3 != 0
    with ties.of_layer(real):
        _, chosen = dsa.fused_qk_topk_naive(q, k, weights, 4, varlen_starts=starts, varlen_ends=ends)
    wanted, tied = naive(scores, 4)
    assert as_sets(chosen[0]) == wanted
    assert ties.take().tolist() == [(torch.tensor(tied) & real).sum(), real.sum()]
    assert 5 < sum(tied) < sum(lengths) - 5


@pytest.mark.parametrize("cp", [1, 2])
def test_in_tilelang(monkeypatch, ties, cp):
    """The logits of TileLang's kernel are computed here by torch; the selection around it is Megatron's. Rows come in
    blocks, keys of a context-parallel rank in an order of their own, and the loss takes scores beside their tokens."""
    pytest.importorskip("tilelang")
    from megatron.core.transformer.experimental_attention_variant.ops import indexer, tilelang_dsa

    from slime.backends.megatron_utils import indexer_ties
    from tests.helpers.tiny_megatron import zigzag

    def logits(q, k, weights, starts, ends, clean_logits, use_relu):
        assert clean_logits and use_relu
        scores = (torch.einsum("shd,td->sht", q.float(), k.float()).relu() * weights[..., None]).sum(1)
        keys = torch.arange(len(k))
        return scores.masked_fill((keys < starts[:, None]) | (keys >= ends[:, None]), -torch.inf)

    monkeypatch.setattr(indexer, "indexer_fwd_interface", logits)
    monkeypatch.setattr(indexer, "_select_topk_from_logits", indexer._select_topk_from_logits)
    indexer_ties.install("tilelang")
    indexer_ties.install("tilelang")  # once is enough: a second time changes nothing
    assert not hasattr(indexer._select_topk_from_logits.__wrapped__, "__wrapped__")
    lengths = [16, 4, 24]
    q, k, weights, scores = small_integers(lengths, 7)
    wanted, tied = naive(scores, 4)
    counted = torch.zeros(2, dtype=torch.int64)
    for rank in range(cp):
        rows = zigzag(torch.arange(sum(lengths)), lengths, cp, rank) if cp > 1 else torch.arange(sum(lengths))
        starts, ends = (bound[rows].int() for bound in bounds(lengths))
        options = {"use_local_indexer_varlen": True, "local_packed_cp_rank": rank, "cp_size": cp} if cp > 1 else {}
        options |= {"packed_seq_params": packed(lengths, "cpu")}
        with ties.of_layer(torch.ones(len(rows), dtype=torch.bool)):
            chosen = tilelang_dsa.run_fused_qk_topk(
                q[rows].bfloat16(), k.bfloat16(), weights[rows], 4, starts, ends, 10, **options
            )
        assert as_sets(chosen[0]) == [wanted[row] for row in rows.tolist()]
        counted += ties.take()
    assert counted.tolist() == [sum(tied), sum(lengths)]
    values, found = indexer.IndexerFunction.apply(
        q[:, 0].bfloat16(), k[:, 0].bfloat16(), weights[:, 0], *(bound.int() for bound in bounds(lengths)), 4
    )
    assert as_sets(found) == wanted
    assert torch.equal(values[found >= 0], torch.tensor(scores).gather(1, found.clamp(min=0).long())[found >= 0])


def test_a_layer_without_scores_takes_the_first_tokens(ties):
    """Relu leaves nothing of any head, or no head has a weight: every query takes the first tokens of its sequence."""
    layer = build_attention(make_config(dataclasses.replace(TINY, index_topk=3), torch.float32, "none"), CHOOSING)
    with torch.no_grad():
        layer.core_attention.indexer.linear_weights_proj.weight.zero_()
    lengths, generator = (9, 2, 6), torch.Generator().manual_seed(2)
    x = torch.randn(17, 1, TINY.hidden_size, generator=generator)
    for training in (True, False):
        params = packed(lengths, "cpu")
        params.real_token_mask_q = torch.arange(17) < 15  # of the third sequence, two tokens are padding
        layer.train(training)(x, None, packed_seq_params=params)
        firsts = [range(s, s + min(t + 1, 3)) for s, n in ((0, 9), (9, 2), (11, 6)) for t in range(n)]
        assert as_sets(choice_of(params)[0]) == [set(first) for first in firsts]
        counted = ties.take()
        if training:
            assert counted.tolist() == [6 + 0 + 1, 15]
        else:
            assert counted is None  # log-probs are computed often; the training step counts


@pytest.mark.parametrize(("shared", "training", "choices"), [(True, True, 5), (False, True, 7), (True, False, 4)])
def test_the_indexers_loss_is_a_mean_over_choices(monkeypatch, tmp_path, ties, shared, training, choices):
    """4 of 8 layers choose, and a prediction layer that runs 3 times does so once or in each run, by config.json."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    from slime.backends.megatron_utils.indexer_loss import indexer_metrics

    (tmp_path / "config.json").write_text(json.dumps({"index_share_for_mtp_iteration": shared}))
    args = Namespace(
        experimental_attention_variant="dsa", dsa_indexer_loss_coeff=0.5, dsa_indexer_topk_freq=4, num_layers=8,
        dsa_indexer_skip_topk_offset=3, hf_checkpoint=str(tmp_path), enable_mtp_training=training, mtp_num_layers=3,
    )  # fmt: skip
    sums = {"values": torch.full((8,), 2 * choices * 0.5 * 0.3 / 8)}
    monkeypatch.setattr(DSAIndexerLossLoggingHelper, "tracker", sums)
    with ties.of_layer(torch.tensor([True, True, False])):
        ties.note(torch.tensor([False, True, True]))
    metrics = indexer_metrics(args, num_microbatches=2)
    assert metrics == {"indexer_ties": 0.5, "indexer_kl": pytest.approx(0.3)}
    args.dsa_indexer_loss_coeff = None
    assert indexer_metrics(args, num_microbatches=2) == {}


def test_kernels_that_hide_their_scores_are_not_counted(ties):
    with ties.of_layer(torch.ones(4, dtype=torch.bool)):
        pass
    assert ties.take() is None


def test_a_layer_that_fails_leaves_no_count_behind(ties):
    with pytest.raises(RuntimeError), ties.of_layer(torch.ones(2, dtype=torch.bool)):
        ties.note(torch.ones(2, dtype=torch.bool))
        raise RuntimeError
    ties.note(torch.ones(3, dtype=torch.bool))
    assert ties.take() is None
