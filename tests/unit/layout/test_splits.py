"""Cutting layers into stages: against brute force."""

import itertools

import pytest

from slime.utils.layout import LayoutError, balanced_counts, engine_stages, equal_middle_splits
from tests.helpers.upstream_source import functions_of

STARTS = (True, True, False, False, True, False, True, True, False, True, False)


def brute_force(layers, stages, starts):
    for counts in itertools.product(range(1, layers + 1), repeat=stages):
        begins = [sum(counts[:i]) for i in range(stages)]
        if sum(counts) == layers and all(starts[begin] for begin in begins):
            yield counts


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("starts", [STARTS, (True,) * 11])
def test_balanced_counts_are_the_most_even_legal_ones(stages, starts):
    best = min(brute_force(11, stages, starts), key=lambda counts: sum(n * n for n in counts))
    mine = balanced_counts(11, stages, starts)
    assert mine in list(brute_force(11, stages, starts))
    assert sum(n * n for n in mine) == sum(n * n for n in best)


def test_more_stages_than_starts_cannot_be_cut():
    assert balanced_counts(11, 7, STARTS) is None and balanced_counts(3, 4) is None


@pytest.mark.parametrize("stages", range(2, 6))
@pytest.mark.parametrize("multiple_of", [1, 2])
def test_equal_middle_splits_are_all_of_them_in_order(stages, multiple_of):
    starts = (True,) * 12 if multiple_of == 2 else (*STARTS, True)
    found = {
        (counts[0], counts[-1]): sum(n * n for n in counts)
        for counts in brute_force(12, stages, starts)
        if len(set(counts[1:-1])) <= 1 and not any(n % multiple_of for n in counts)
    }
    mine = equal_middle_splits(12, stages, starts, multiple_of)
    assert sorted(mine) == sorted(found)
    assert [found[split] for split in mine] == sorted(found.values())


@pytest.mark.parametrize("partition", [None, "3,1,0,7"])
def test_engine_stages_are_sglangs(partition):
    class Environment:
        getenv = staticmethod(lambda name, default=None: partition if name == "SGLANG_PP_LAYER_PARTITION" else default)

    sglang = functions_of("sglang", "srt/distributed/utils.py", ["get_pp_indices"], os=Environment)
    for layers in [11] if partition else [1, 4, 11, 78]:
        theirs = [range(*sglang.get_pp_indices(layers, rank, 4)) for rank in range(4)]
        assert list(engine_stages(layers, 4, partition)) == theirs


@pytest.mark.parametrize(
    "partition, message",
    [
        ("5,6,0", r"lists 3 ranks \(5,6,0\), --sglang-pp-size is 2; try: SGLANG_PP_LAYER_PARTITION=5,6"),
        ("5,5", r"5 \+ 5 = 10, the model has 11 layers; try: SGLANG_PP_LAYER_PARTITION=5,6"),
        ("5;6", "is '5;6', must be layers per rank"),
        ("-1,12", "must be layers per rank"),
    ],
)
def test_partitions_that_do_not_fit_are_refused(partition, message):
    with pytest.raises(LayoutError, match=message):
        engine_stages(11, 2, partition)


def test_an_engine_has_a_rank():
    with pytest.raises(LayoutError, match="--sglang-pp-size: is 0"):
        engine_stages(11, 0)
