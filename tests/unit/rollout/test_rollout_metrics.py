"""Metrics of rollouts and evaluations on samples whose numbers can be worked out by hand."""

import itertools
import random
import statistics

import pytest

from slime.rollout.metrics import eval_metrics, is_repetitive, pass_rates, rollout_metrics
from slime.utils.types import PrefixCacheInfo, Sample, SpecInfo
from tests.helpers.rollout_args import rollout_args

HERE = __name__


def sample(group, reward, length, masked=0, **fields) -> Sample:
    made = Sample(group_index=group, reward=reward, tokens=[1] * (length + 2), response_length=length, **fields)
    made.loss_mask = [0] * masked + [1] * (length - masked)
    return made


@pytest.fixture
def samples():
    return [
        sample(0, 1.0, 4, masked=1, status=Sample.Status.COMPLETED, prefix_cache_info=PrefixCacheInfo(3, 10)),
        sample(
            0,
            1.0,
            8,
            status=Sample.Status.TRUNCATED,
            prefix_cache_info=PrefixCacheInfo(2, 10),
            non_generation_time=1.0,
        ),
        sample(1, 0.0, 2, status=Sample.Status.COMPLETED),
        sample(1, 1.0, 6, masked=6, status=Sample.Status.ABORTED),
    ]


def test_rollout_numbers(samples):
    metrics = rollout_metrics(0, rollout_args(rollout_num_gpus=2), samples, {"rollout/mine": 7}, rollout_time=4.0)
    assert metrics == {
        "rollout/response_len/mean": 13 / 4,
        "rollout/response_len/median": 2.5,
        "rollout/response_len/max": 8.0,
        "rollout/response_len/min": 0.0,
        "rollout/zero_std/count_1": 1.0,
        "rollout/prefix_cache_hit_rate": 5 / 20,
        "rollout/avg_cached_tokens_per_sample": 5 / 4,
        "rollout/repetition_frac": 0.0,
        "rollout/truncated_ratio": 0.25,
        "rollout/aborted_ratio": 0.25,
        "rollout/raw_reward": 0.75,
        "perf/rollout_time": 4.0,
        "perf/non_generation_time/mean": 0.25,
        "perf/non_generation_time/median": 0.0,
        "perf/non_generation_time/max": 1.0,
        "perf/non_generation_time/min": 0.0,
        "perf/tokens_per_gpu_per_sec": 20 / 2 / 4,
        "perf/effective_tokens_per_gpu_per_sec": 13 / 2 / 4,
        "perf/longest_sample_tokens_per_sec": 8 / 4,
        "perf/longest_effective_sample_tokens_per_sec": 8 / 4,
        "perf/longest_sample_non_generation_time": 1.0,
        "perf/longest_effective_sample_non_generation_time": 1.0,
        "perf/longest_sample_tokens_per_sec_without_non_generation": 8 / 3,
        "perf/longest_effective_sample_tokens_per_sec_without_non_generation": 8 / 3,
        "rollout/mine": 7,
    }


def test_optional_numbers(samples):
    samples[0].spec_info = SpecInfo(6, 10, 5, 15)
    samples[1].spec_info = SpecInfo(2, 10, 5, 5)
    samples[0].rollout_top_p_token_ids = [1, 2, 3, 4, 5, 6]
    for s, category in zip(samples, ("ok", "ok", "syntax", "ok"), strict=True):
        s.reward = {"score": s.reward, "category": category}
    args = rollout_args(reward_key="score", log_reward_category="category")
    args.sglang_speculative_algorithm = "EAGLE"
    metrics = rollout_metrics(0, args, samples, None, 1.0)
    assert metrics["rollout/spec_accept_rate"] == 8 / 20 and metrics["rollout/spec_accept_length"] == 20 / 10
    assert metrics["rollout/top_p_kept_vocab_per_token"] == 6 / 3
    assert metrics["rollout/error_cat/ok"] == 0.75 and metrics["rollout/error_cat/syntax"] == 0.25
    assert metrics["rollout/zero_std/count_1"] == 1 and metrics["rollout/raw_reward"] == 0.75
    assert not any(
        "zero_std" in key for key in rollout_metrics(0, rollout_args(advantage_estimator="ppo"), samples, None, 1.0)
    )


def test_multi_turn_numbers(samples):
    """Lengths 4, 8, 2, 6 with 3, 8, 2, 0 trained tokens; the limit is 6."""
    args = rollout_args(log_multi_turn=True, rollout_max_response_len=6)
    samples[0].metadata["round_number"], samples[2].metadata["round_number"] = 2, 5
    found = {k: v for k, v in rollout_metrics(0, args, samples, None, 1.0).items() if k.startswith("multi_turn/")}
    assert found == {
        "multi_turn/raw_response_length/response_length_mean": 5.0,
        "multi_turn/raw_response_length/response_length_max": 8.0,
        "multi_turn/raw_response_length/response_length_min": 2.0,
        "multi_turn/raw_response_length/response_length_clip_ratio": 0.5,
        "multi_turn/wo_obs_response_length/response_length_mean": 13 / 4,
        "multi_turn/wo_obs_response_length/response_length_max": 8.0,
        "multi_turn/wo_obs_response_length/response_length_min": 0.0,
        "multi_turn/multi_turn_metric/round_number_mean": 3.5,
        "multi_turn/multi_turn_metric/round_number_max": 5.0,
        "multi_turn/multi_turn_metric/round_number_min": 2.0,
    }
    for s in samples:
        s.metadata.clear()
    assert not any("round" in name for name in rollout_metrics(0, args, samples, None, 1.0))


def test_pass_rates_of_a_rollout(samples):
    """Groups (1, 1) and (0, 1)."""
    metrics = rollout_metrics(0, rollout_args(log_passrate=True), samples, None, 1.0)
    assert {k: v for k, v in metrics.items() if "passrate" in k} == {"passrate/pass@1": 0.75, "passrate/pass@2": 1.0}
    assert not any("passrate" in name for name in rollout_metrics(0, rollout_args(), samples, None, 1.0))


def test_rewards_that_are_no_numbers_are_left_to_the_post_process(samples):
    samples[0].reward = "good"
    metrics = rollout_metrics(0, rollout_args(), samples, None, 1.0)
    assert "rollout/raw_reward" not in metrics and metrics["rollout/truncated_ratio"] == 0.25


def test_repetition_looks_at_the_end_of_long_texts_only():
    noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=10_001))
    assert is_repetitive(noise + "so " * 4000)
    assert not is_repetitive("so " * 3000), "9,000 characters are not long"
    assert not is_repetitive("so " * 4000 + noise)


def test_pass_rates_count_subsets():
    """pass@k is the chance that k answers drawn without repetition hold a right one; checked on all subsets."""
    correct = [[True, False, False, False, True], [False] * 4, [True] * 6]
    rates = pass_rates(correct)
    assert list(rates) == [1, 2, 4]
    for k, rate in rates.items():
        chances = [statistics.fmean(any(subset) for subset in itertools.combinations(group, k)) for group in correct]
        assert rate == pytest.approx(statistics.fmean(chances))


def test_eval_numbers(samples):
    data = {"math": {"rewards": [1.0, 1.0, 0.0, 1.0], "truncated": [False, True, False, False], "samples": samples}}
    metrics = eval_metrics(0, rollout_args(log_passrate=True), data, {"eval/mine": 1})
    assert metrics["eval/math"] == 0.75 and metrics["eval/math-truncated_ratio"] == 0.25
    assert (
        metrics["eval/math-pass@1"] == 0.75
        and metrics["eval/math-pass@2"] == 1.0
        and "eval/math-pass@4" not in metrics
    )
    assert metrics["eval/math/response_len/max"] == 8.0 and metrics["eval/mine"] == 1
    with pytest.raises(ValueError, match="'empty' produced no samples"):
        eval_metrics(0, rollout_args(), {"empty": {"rewards": [], "truncated": [], "samples": []}}, None)


_calls: list = []


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    _calls.append((rollout_id, len(samples), rollout_extra_metrics, rollout_time))
    return rollout_id == 1


def log_eval(rollout_id, args, data, extra_metrics):
    _calls.append((rollout_id, list(data), extra_metrics))
    return True


def test_custom_log_functions_may_take_over(samples):
    _calls.clear()
    args = rollout_args(
        custom_rollout_log_function_path=f"{HERE}.log_rollout",
        custom_eval_rollout_log_function_path=f"{HERE}.log_eval",
    )
    assert rollout_metrics(1, args, samples, {"a": 1}, 2.0) == {}
    assert rollout_metrics(2, args, samples, None, 2.0)["perf/rollout_time"] == 2.0
    assert eval_metrics(3, args, {"math": {}}, None) == {}
    assert _calls == [(1, 4, {"a": 1}, 2.0), (2, 4, None, 2.0), (3, ["math"], None)]
