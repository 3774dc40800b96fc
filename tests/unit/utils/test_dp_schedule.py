"""The schedule trains every sample once, respects capacity and layout, and explains what it cannot do."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.flops import flops_of_sequences
from tests.helpers.shape_args import shape_args

MODEL = {
    "num_layers": 2,
    "hidden_size": 40,
    "num_attention_heads": 4,
    "ffn_hidden_size": 72,
    "swiglu": True,
    "add_bias_linear": False,
    "vocab_size": 99,
}


def make_args(**flags):
    defaults = {
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 50,
        "micro_batch_size": 1,
        "balance_data": False,
        "balance_by_flops": False,
    }
    return shape_args(**{**MODEL, **defaults, **flags})


def layout(dp=1, cp=1, vpp=1, group=1):
    return {"dp_size": dp, "cp_size": cp, "vpp_size": vpp, "microbatch_group_size_per_vp_stage": group}


def build(lengths, gbs=None, ids=None, config=None, **flags):
    ids = list(range(len(lengths))) if ids is None else ids
    gbs = gbs or len(set(ids))
    return build_dp_schedule(
        make_args(**flags), config or layout(), lengths, global_batch_size=gbs, rollout_indices=ids
    )


def micro_batches(schedule, rank):
    """Global sample positions of each micro-batch of a rank."""
    return [[schedule.partitions[rank][i] for i in batch] for batch in schedule.micro_batch_indices[rank]]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_sample_of_every_full_step_is_trained_exactly_once(data):
    dp, cp = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2]))
    vpp, group = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 3)]))
    unit = dp * (group if vpp > 1 else 1)
    gbs = data.draw(st.integers(1, 4)) * unit
    fanout = data.draw(st.lists(st.integers(1, 3), min_size=gbs, max_size=gbs * 3))
    ids = [7 * i + 3 for i, k in enumerate(fanout) for _ in range(k)]
    mode = data.draw(st.sampled_from(["dynamic", "balance", "flops", "static"]))
    # Static chunks of one sample only suit the layout when every step has a multiple of `unit` samples.
    ids = list(range(len(ids))) if mode == "static" else data.draw(st.permutations(ids))
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=len(ids), max_size=len(ids)))
    flags = {
        "use_dynamic_batch_size": mode != "static",
        "balance_data": mode in ("balance", "flops"),
        "balance_by_flops": mode == "flops",
    }
    try:
        schedule = build(lengths, gbs, ids, layout(dp, cp, vpp, group), **flags)
    except ValueError as error:
        # Growing to a multiple of `unit` needs that many samples; steps that lack them are refused.
        assert "must grow to" in str(error) and mode != "static"
        return

    order = list(dict.fromkeys(ids))
    steps = len(order) // gbs
    assert schedule.global_batch_sizes == [gbs] * steps and len(schedule.num_microbatches) == steps
    trained = [set(order[s * gbs : (s + 1) * gbs]) for s in range(steps)]
    for rank in range(dp):
        batches = micro_batches(schedule, rank)
        assert sum(schedule.micro_batch_indices[rank], []) == list(range(len(schedule.partitions[rank])))
        assert len(batches) == sum(schedule.num_microbatches) and all(batches)
        for batch in batches:
            assert len(batch) == 1 or sum(lengths[i] for i in batch) <= 50 * cp
            assert batch == sorted(batch, key=lambda i: (order.index(ids[i]), i))
    for step, rollouts in enumerate(trained):
        start, stop = sum(schedule.num_microbatches[:step]), sum(schedule.num_microbatches[: step + 1])
        seen = sorted(i for rank in range(dp) for b in micro_batches(schedule, rank)[start:stop] for i in b)
        assert seen == [i for i, rollout in enumerate(ids) if rollout in rollouts]
        assert (stop - start) * dp % unit == 0


def naive_first_fit(lengths, capacity):
    bins, room = [], []
    for i, n in enumerate(lengths):
        for b in range(len(bins)):
            if n <= room[b]:
                bins[b].append(i)
                room[b] -= n
                break
        else:
            bins.append([i])
            room.append(capacity - n)
    return bins


@settings(deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=80))
def test_dynamic_packing_is_first_fit(lengths):
    assert micro_batches(build(lengths), 0) == naive_first_fit(lengths, 50)


def test_context_parallelism_widens_the_bins():
    assert micro_batches(build([40, 40, 20, 30], config=layout(cp=2)), 0) == [[0, 1, 2], [3]]


def test_bins_split_heaviest_first_until_they_suit_the_layout():
    """[30 15], [48]: 48 is alone, so [30 15] splits; then nothing is left to split."""
    schedule = build([30, 48, 15], config=layout(dp=3))
    assert [micro_batches(schedule, r) for r in range(3)] == [[[0]], [[1]], [[2]]]
    # 9+8 against 7+6+5: longest first to the lighter half.
    schedule = build([9, 8, 7, 6, 5], config=layout(dp=2))
    assert [micro_batches(schedule, r) for r in range(2)] == [[[0, 3, 4]], [[1, 2]]]


def test_virtual_pipeline_needs_a_multiple_of_its_group_on_every_rank():
    for mode in ({}, {"balance_data": True}, {"balance_data": True, "balance_by_flops": True}):
        schedule = build([10] * 13, config=layout(dp=2, vpp=2, group=3), **mode)
        assert schedule.num_microbatches == [3]


def test_static_mode_is_consecutive_chunks_dealt_round_robin():
    schedule = build([1] * 8, gbs=8, use_dynamic_batch_size=False, micro_batch_size=2, config=layout(dp=2))
    assert [micro_batches(schedule, r) for r in range(2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_balance_data_evens_out_flops_over_ranks():
    lengths = [48, 2, 47, 3, 46, 4, 45, 5]
    flops = flops_of_sequences(lengths, make_args())

    def spread(**flags):
        schedule = build(lengths, config=layout(dp=2), use_dynamic_batch_size=False, **flags)
        sums = [sum(flops[i] for i in part) for part in schedule.partitions]
        assert schedule.num_microbatches == [4]
        return max(sums) - min(sums)

    assert spread(balance_data=True) < spread() / 20


def test_balance_by_flops_keeps_capacity_and_micro_batch_count():
    """Long samples cost more per token; bins of equal FLOPs that would overflow are not used."""
    lengths = [50, 9, 9, 9, 9, 9, 8, 8, 8, 8, 8, 8, 7, 7]
    plain = build(lengths)
    balanced = build(lengths, balance_data=True, balance_by_flops=True)
    assert balanced.num_microbatches[0] <= plain.num_microbatches[0]
    for batch in micro_batches(balanced, 0):
        assert sum(lengths[i] for i in batch) <= 50


def test_surplus_rollouts_are_counted(caplog):
    with caplog.at_level(logging.WARNING):
        schedule = build([5] * 7, gbs=2, ids=[0, 0, 1, 2, 3, 4, 4])
    assert sorted(schedule.partitions[0]) == [0, 1, 2, 3, 4]
    assert "1 of 5 rollouts (2 samples) are not trained" in caplog.text
    caplog.clear()
    build([5] * 4, gbs=2)
    assert not caplog.text


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (
            "3 samples < dp 4: raise --rollout-batch-size",
            lambda: build([1, 2, 3], config=layout(dp=4)),
        ),
        (
            "2 rollouts < --global-batch-size 4: not one optimizer step.*use --global-batch-size 2",
            lambda: build([1, 2], gbs=4),
        ),
        (
            r"6 samples / --micro-batch-size 2 = 3 micro-batches, not a multiple of dp 2 x .* 1 = 2: "
            r"use --micro-batch-size [13].* multiple of 4",
            lambda: build([1] * 6, use_dynamic_batch_size=False, micro_batch_size=2, config=layout(dp=2)),
        ),
        (
            r"5 samples cannot fill dp 2 x --microbatch-group-size-per-virtual-pipeline-stage 3 = 6",
            lambda: build([1] * 5, config=layout(dp=2, vpp=2, group=3)),
        ),
        (
            r"3 micro-batches must grow to 4, a multiple of dp 2 .* only 3 samples: raise --max-tokens-per-gpu",
            lambda: build([50] * 3, config=layout(dp=2)),
        ),
        ("sample 1 has 0 tokens", lambda: build([3, 0])),
        ("2 total_lengths but 1 rollout_indices", lambda: build([3, 4], gbs=1, ids=[0])),
        (
            "--global-batch-size 0 must be at least 1",
            lambda: build_dp_schedule(make_args(), layout(), [1], global_batch_size=0, rollout_indices=[0]),
        ),
    ],
)
def test_errors_carry_the_arithmetic(message, call):
    with pytest.raises(ValueError, match=message):
        call()
