"""The plan's batch arithmetic holds for the schedule that training really makes, at the extremes and between."""

import random
from argparse import Namespace

import pytest

from slime.plan.batch import BatchError, plan_batch
from slime.utils.dp_schedule import build_dp_schedule


def arguments(**changed) -> Namespace:
    values = dict(
        rollout_batch_size=24,
        n_samples_per_prompt=8,
        global_batch_size=96,
        over_sampling_batch_size=24,
        num_rollout=5,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=50,
        micro_batch_size=1,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=None,
        rollout_max_context_len=None,
        rollout_max_prompt_len=10,
        rollout_max_response_len=30,
        balance_data=False,
        balance_by_flops=False,
        eval_datasets=[],
    )
    return Namespace(**{**values, **changed})


def scheduled(a: Namespace, lengths: list[int], dp_size: int, vp_size: int) -> list[int]:
    """Micro-batches per rank of each step in the schedule that training uses."""
    layout = {
        "dp_size": dp_size,
        "cp_size": a.context_parallel_size,
        "vpp_size": vp_size,
        "microbatch_group_size_per_vp_stage": a.pipeline_model_parallel_size,
    }
    schedule = build_dp_schedule(
        a, layout, lengths, global_batch_size=a.global_batch_size, rollout_indices=range(len(lengths))
    )
    return schedule.num_microbatches


@pytest.mark.parametrize("vp_size", [1, 3])
@pytest.mark.parametrize("dp_size", [1, 4])
def test_micro_batches_stay_within_the_bounds_and_reach_them(dp_size, vp_size):
    """All samples as short, or as long, as they can be give the least and the most passes; random ones lie between."""
    a = arguments()
    plan = plan_batch(a, dp_size=dp_size, vp_size=vp_size)
    assert (plan.samples, plan.steps, plan.untrained, plan.samples_per_rank) == (192, 2, 0, 96 / dp_size)
    assert (plan.capacity, plan.longest_sample, plan.longest_on_gpu) == (100, 40, 50)
    assert scheduled(a, [2] * 192, dp_size, vp_size) == [plan.micro_batches.least] * 2
    assert scheduled(a, [40] * 192, dp_size, vp_size) == [plan.micro_batches.most] * 2
    rng = random.Random(dp_size + vp_size)
    for _ in range(20):
        longest = rng.randint(2, 40)
        for count in scheduled(a, [rng.randint(2, longest) for _ in range(192)], dp_size, vp_size):
            assert plan.micro_batches.least <= count <= plan.micro_batches.most


def test_static_micro_batches_are_exact():
    a = arguments(use_dynamic_batch_size=False, micro_batch_size=3)
    plan = plan_batch(a, dp_size=4, vp_size=1)
    assert scheduled(a, [7] * 192, 4, 1) == [plan.micro_batches.least] * 2 == [8, 8]
    assert plan.micro_batches.most == 8 and plan.capacity is None
    assert plan.longest_on_gpu == 60  # three samples of 40 over two ranks


def test_a_sample_above_the_capacity_is_seen():
    """A response of 900 tokens in bins of 100 travels alone: 455 tokens on each of two ranks, not the 50 asked for."""
    a = arguments(rollout_max_response_len=900)
    plan = plan_batch(a, dp_size=4, vp_size=1)
    assert (plan.longest_sample, plan.longest_on_gpu) == (910, 455)
    assert scheduled(a, [910] * 192, 4, 1) == [plan.micro_batches.most] * 2 == [24, 24]


def test_uncapped_prompts_leave_the_longest_sample_open():
    plan = plan_batch(arguments(rollout_max_prompt_len=None), dp_size=4, vp_size=1)
    assert plan.longest_sample is plan.longest_on_gpu is plan.max_tokens_per_rollout is None
    assert plan.micro_batches.most == 24  # one sample a micro-batch
    assert plan_batch(arguments(rollout_max_context_len=64), dp_size=4, vp_size=1).longest_sample == 64


def test_left_over_samples_are_counted():
    """8 x 24 samples in steps of 100: 92 are generated, scored and thrown away; the plan has to say so."""
    plan = plan_batch(arguments(global_batch_size=100), dp_size=4, vp_size=1)
    assert (plan.steps, plan.untrained) == (1, 92)


def test_less_than_one_step_is_an_error_with_the_arithmetic():
    with pytest.raises(BatchError, match="24 x --n-samples-per-prompt 8 = 192 samples are less than .* 256"):
        plan_batch(arguments(global_batch_size=256), dp_size=4, vp_size=1)
