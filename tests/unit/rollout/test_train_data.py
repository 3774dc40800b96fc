"""From samples to train data to data-parallel shards: normalisation against numpy, nothing lost, every bad sample
named.
"""

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.train_data import convert_samples_to_train_data, post_process_rewards, split_train_data_by_dp
from slime.utils.types import Sample
from tests.helpers.rollout_args import rollout_args

HERE = __name__


def sample(index, group, reward, length=2, **fields) -> Sample:
    made = Sample(index=index, group_index=group, reward=reward, tokens=[7], status=Sample.Status.COMPLETED)
    made.append_response_tokens(tokens=list(range(length)), log_probs=[-0.5] * length)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def normalised(rewards, groups, **changes):
    samples = [sample(i, g, r) for i, (r, g) in enumerate(zip(rewards, groups, strict=True))]
    return post_process_rewards(rollout_args(**changes), samples)[1]


# ---- rewards ----


def test_uneven_groups_are_normalised_by_group_index():
    assert normalised([1, 3, 5], [0, 0, 1], n_samples_per_prompt=2) == pytest.approx([-0.7071, 0.7071, 0], abs=1e-4)
    rewards, groups = [1, 0, 1, 0, 5, 5, 5, 1, 1, 0, 0], [0] * 4 + [1] * 3 + [2] * 4
    expected = [0.866, -0.866, 0.866, -0.866, 0, 0, 0, 0.866, 0.866, -0.866, -0.866]
    assert normalised(rewards, groups) == pytest.approx(expected, abs=1e-3)
    order = [5, 0, 9, 3, 7, 1, 10, 4, 8, 2, 6]
    shuffled = normalised([rewards[i] for i in order], [groups[i] for i in order])
    assert shuffled == pytest.approx([expected[i] for i in order], abs=1e-3)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-1e3, 1e3, width=32)), min_size=1, max_size=30))
def test_normalisation_equals_numpy_on_ragged_groups(pairs):
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    result = normalised(rewards, groups)
    centred = normalised(rewards, groups, advantage_estimator="reinforce_plus_plus_baseline")
    for group in set(groups):
        values = np.array([r for g, r in pairs if g == group], dtype=np.float64)
        got = [r for r, g in zip(result, groups, strict=True) if g == group]
        if len(values) == 1 or np.ptp(values) == 0:
            assert got == [0.0] * len(values)
            continue
        deviation = values - values.mean()
        assert got == pytest.approx(deviation / (values.std(ddof=1) + 1e-6), rel=1e-6, abs=1e-9)
        assert [r for r, g in zip(centred, groups, strict=True) if g == group] == pytest.approx(deviation, abs=1e-9)


def test_equal_rewards_give_exact_zeros_whatever_the_rounding():
    """Three times 0.1 has a float mean of 0.10000000000000002: dividing that rest by 1e-6 would make an advantage of
    it.
    """
    assert normalised([0.1] * 3, [0] * 3) == [0.0] * 3


def test_which_estimators_normalise():
    rewards, groups = [1.0, 2.0, 4.0], [0, 0, 0]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    by_std = [(r - mean) / (std + 1e-6) for r in rewards]
    centred = [r - mean for r in rewards]
    for estimator in ("grpo", "gspo", "cispo"):
        assert normalised(rewards, groups, advantage_estimator=estimator) == pytest.approx(by_std)
        assert normalised(rewards, groups, advantage_estimator=estimator, grpo_std_normalization=False) == centred
    assert normalised(rewards, groups, advantage_estimator="reinforce_plus_plus_baseline") == centred
    for estimator in ("ppo", "reinforce_plus_plus"):
        assert normalised(rewards, groups, advantage_estimator=estimator) == rewards
    assert normalised(rewards, groups, rewards_normalization=False) == rewards


def test_without_group_indices_consecutive_runs_are_groups():
    assert normalised([1, 2, 5, 5], [None] * 4, n_samples_per_prompt=2) == pytest.approx(
        [-0.7071, 0.7071, 0, 0], abs=1e-4
    )
    with pytest.raises(ValueError, match="3 of 3 samples have no group_index.*multiple of --n-samples-per-prompt 2"):
        normalised([1, 2, 5], [None] * 3, n_samples_per_prompt=2)
    with pytest.raises(ValueError, match="1 of 3 samples have no group_index"):
        normalised([1, 2, 5], [0, None, 0], n_samples_per_prompt=3)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "good", {"score": 1}])
def test_a_reward_that_is_no_number_names_the_sample(reward):
    with pytest.raises(ValueError, match="sample index=17 group_index=4: .*reward"):
        convert_samples_to_train_data(rollout_args(), [sample(0, 4, 1.0), sample(17, 4, reward)])


def test_reward_key_and_raw_reward_of_the_metadata():
    args = rollout_args(reward_key="score")
    samples = [sample(i, 0, {"score": float(i), "acc": 9}) for i in range(3)]
    samples[1].metadata["raw_reward"] = 55
    data = convert_samples_to_train_data(args, samples)
    assert data["raw_reward"] == [0.0, 55, 2.0]
    assert data["rewards"] == pytest.approx([-1, 0, 1], abs=1e-5)


def minus_one(args, samples):
    return torch.tensor([1.0] * len(samples)), [-1.0] * len(samples)


def one_short(args, samples):
    return [1.0], [1.0]


def test_custom_post_process_replaces_normalisation():
    """It may read rewards that are no numbers; what it returns must cover every sample."""
    args = rollout_args(custom_reward_post_process_path=f"{HERE}.minus_one")
    data = convert_samples_to_train_data(args, [sample(i, 0, {"x": "y"}) for i in range(3)])
    assert data["rewards"] == [-1.0] * 3 and data["raw_reward"] == [1.0] * 3
    with pytest.raises(ValueError, match="1 raw and 1 rewards for 3 samples"):
        post_process_rewards(
            rollout_args(custom_reward_post_process_path=f"{HERE}.one_short"), [sample(i, 0, 1) for i in range(3)]
        )


# ---- columns ----


def test_columns_of_a_plain_rollout():
    samples = [sample(10 + i, i // 3, float(i), length=i + 1) for i in range(6)]
    samples[2].status = Sample.Status.TRUNCATED
    samples[3].remove_sample = True
    samples[4].loss_mask = [1, 0, 0, 1, 1]
    samples[5].metadata["source_name"] = "math"
    data = convert_samples_to_train_data(rollout_args(), samples)
    assert set(data) == {
        "tokens", "response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "rollout_ids",
        "loss_masks",
        "rollout_mask_sums", "source_names", "rollout_log_probs",
    }  # fmt: skip
    assert data["tokens"][2] == [7, 0, 1, 2] and data["response_lengths"] == [1, 2, 3, 4, 5, 6]
    assert data["truncated"] == [0, 0, 1, 0, 0, 0]
    assert data["sample_indices"] == list(range(10, 16))
    assert data["loss_masks"] == [[1], [1] * 2, [1] * 3, [0] * 4, [1, 0, 0, 1, 1], [1] * 6]
    assert data["rollout_ids"] == [0, 1, 2, 3, 4, 5]
    assert data["rollout_mask_sums"] == [1, 2, 3, 0, 3, 6]
    assert data["source_names"] == ["unknown"] * 5 + ["math"]
    assert sum(x is not None for x in data["rewards"]) == 6, "a removed sample still counts in its group's mean"


def test_siblings_of_one_execution_share_their_mask_sum():
    samples = [sample(i, 0, float(i), length=i + 1) for i in range(5)]
    samples[1].rollout_id = samples[3].rollout_id = 1
    data = convert_samples_to_train_data(rollout_args(), samples)
    assert data["rollout_ids"] == [0, 1, 2, 1, 3], "missing ids get the smallest unused ones"
    assert data["rollout_mask_sums"] == [1, 6, 3, 6, 5]


def test_a_column_must_be_there_for_all_samples_or_for_none():
    samples = [sample(i, 0, float(i)) for i in range(3)]
    samples[0].rollout_log_probs = None
    with pytest.raises(ValueError, match="1 of 3 samples have no rollout_log_probs, first sample index=0"):
        convert_samples_to_train_data(rollout_args(), samples)
    for s in samples:
        s.rollout_log_probs = None
    assert "rollout_log_probs" not in convert_samples_to_train_data(rollout_args(), samples)
    with pytest.raises(ValueError, match="3 of 3 samples have no rollout_top_p_token_ids"):
        convert_samples_to_train_data(rollout_args(rollout_top_p=0.9), samples)


def test_a_mask_of_the_wrong_length_names_the_sample():
    with pytest.raises(ValueError, match="index=3 .*loss_mask"):
        convert_samples_to_train_data(rollout_args(), [sample(3, 0, 1.0, loss_mask=[1])])


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        convert_samples_to_train_data(rollout_args(), [])


def own_conversion(args, samples):
    n = len(samples)
    return {
        "tokens": [s.tokens for s in samples], "response_lengths": [2] * n, "rewards": [0.0] * n,
        "raw_reward": [0.0] * n,
        "truncated": [0] * n, "sample_indices": list(range(n)), "loss_masks": [[1, 1]] * n, "rollout_ids": [5, 5, 6],
        "mine": list("abc"),
    }  # fmt: skip


def incomplete_conversion(args, samples):
    return {"tokens": [], "loss_masks": []}


def test_custom_conversion_is_completed_and_checked():
    args = rollout_args(custom_convert_samples_to_train_data_path=f"{HERE}.own_conversion")
    data = convert_samples_to_train_data(args, [sample(i, 0, None) for i in range(3)])
    assert data["rollout_mask_sums"] == [4, 4, 2] and data["mine"] == ["a", "b", "c"]
    args = rollout_args(custom_convert_samples_to_train_data_path=f"{HERE}.incomplete_conversion")
    with pytest.raises(
        ValueError, match="returned no response_lengths, rewards, raw_reward, truncated, sample_indices "
    ):
        convert_samples_to_train_data(args, [sample(0, 0, None)])


# ---- shards ----


def split_args(**changes):
    args = rollout_args()
    values = {
        "global_batch_size": 4, "micro_batch_size": 1, "use_dynamic_batch_size": False, "max_tokens_per_gpu": None,
        "balance_data": False, "balance_by_flops": False,
    } | changes  # fmt: skip
    for name, value in values.items():
        setattr(args, name, value)
    return args


def parallel(dp):
    return {"dp_size": dp, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_sample_arrives_once_with_all_that_belongs_to_it(dp, dynamic):
    samples = [sample(100 + i, i // 2, float(i % 3), length=1 + (7 * i) % 100) for i in range(8)]
    samples[3].train_metadata = {"note": "x"}
    args = split_args(use_dynamic_batch_size=dynamic, max_tokens_per_gpu=128)
    data = convert_samples_to_train_data(args, samples) | {"mine": list("abcdefgh")}
    shards = split_train_data_by_dp(args, data, parallel(dp))
    assert len(shards) == dp
    assert sorted(p for shard in shards for p in shard["partition"]) == list(range(8))
    for shard in shards:
        n = len(shard["partition"])
        for local, position in enumerate(shard["partition"]):
            original = samples[position]
            assert shard["tokens"][local].dtype == torch.int64 and shard["tokens"][local].tolist() == original.tokens
            assert (
                shard["loss_masks"][local].dtype == torch.int32
                and len(shard["loss_masks"][local]) == original.response_length
            )
            assert shard["rollout_log_probs"][local].dtype == torch.float32
            assert shard["rollout_log_probs"][local].tolist() == original.rollout_log_probs
            assert shard["sample_indices"][local] == original.index
            assert shard["rewards"][local] == data["rewards"][position]
            assert shard["mine"][local] == "abcdefgh"[position]
            assert shard["metadata"][local] == original.train_metadata
        assert shard["rollout_mask_sums"].dtype == torch.float32
        assert shard["rollout_mask_sums"].tolist() == [samples[p].response_length for p in shard["partition"]]
        assert shard["raw_reward"] == data["raw_reward"] and shard["total_lengths"] == [len(s.tokens) for s in samples]
        assert shard["global_batch_sizes"] == [4, 4] and len(shard["num_microbatches"]) == 2
        assert sorted(i for batch in shard["micro_batch_indices"] for i in batch) == list(range(n))


def test_shards_do_not_share_the_memory_of_what_they_were_cut_from():
    """A view would drag its whole storage along when it is sent."""
    everything = torch.arange(1000)
    samples = [sample(i, 0, float(i)) for i in range(4)]
    data = convert_samples_to_train_data(rollout_args(), samples)
    data["tokens"] = [everything[3 * i : 3 * i + 3] for i in range(4)]
    (shard,) = split_train_data_by_dp(split_args(), data, parallel(1))
    assert all(t.untyped_storage().nbytes() == 3 * 8 for t in shard["tokens"])


def test_a_key_of_the_wrong_length_is_named():
    data = convert_samples_to_train_data(rollout_args(), [sample(i, 0, float(i)) for i in range(4)]) | {"mine": [1]}
    with pytest.raises(ValueError, match="'mine' has 1 entries for 4 samples"):
        split_train_data_by_dp(split_args(), data, parallel(1))


def test_samples_without_response_flow_through():
    """One whose prompt filled the context and one that was given up before it had tokens: nobody recorded anything."""
    full = Sample(index=1, group_index=0, reward=3.0, tokens=[4, 5, 6], status=Sample.Status.TRUNCATED)
    nothing = Sample(index=2, group_index=0, reward=0.0, status=Sample.Status.FAILED)
    data = convert_samples_to_train_data(rollout_args(), [sample(0, 0, 0.0), full, nothing])
    assert data["tokens"] == [[7, 0, 1], [4, 5, 6], [0]] and data["response_lengths"] == [2, 0, 0]
    assert data["loss_masks"] == [[1, 1], [], []] and data["rollout_mask_sums"] == [2, 0, 0]
    assert data["rollout_log_probs"] == [[-0.5, -0.5], [], []]
    assert data["rewards"] == pytest.approx([-0.57735, 1.154700, -0.57735], abs=1e-4), "they count in their group"
    (shard,) = split_train_data_by_dp(split_args(global_batch_size=3), data, parallel(1))
    assert [len(x) for x in shard["rollout_log_probs"]] == [2, 0, 0]
    assert {x.dtype for x in shard["loss_masks"]} == {torch.int32}
    assert convert_samples_to_train_data(rollout_args(), [full]).keys().isdisjoint({"rollout_log_probs"})
