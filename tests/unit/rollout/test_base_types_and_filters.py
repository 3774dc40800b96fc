"""Return values of rollout functions, the rule for split executions, and the ready-made filters."""

import pytest

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn, flatten_samples
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.utils.types import Sample
from tests.helpers.rollout_args import rollout_args


def test_bare_returns_are_wrapped():
    def fn(args, rollout_id, data_source, evaluation):
        return {"math": {}} if evaluation else [[args]]

    assert call_rollout_fn(fn, 1, 2, 3, evaluation=False) == RolloutFnTrainOutput([[1]])
    assert call_rollout_fn(fn, 1, 2, 3, evaluation=True) == RolloutFnEvalOutput({"math": {}})
    output = RolloutFnTrainOutput([], {"a": 1})
    assert call_rollout_fn(lambda evaluation: output, evaluation=False) is output
    with pytest.raises(TypeError, match="must return RolloutFnEvalOutput or a dict, got RolloutFnTrainOutput"):
        call_rollout_fn(lambda evaluation: output, evaluation=True)


def siblings(*ids):
    return [Sample(rollout_id=i, group_index=3) for i in ids]


def test_flatten_accepts_mixed_depths_and_checks_split_executions():
    a, b, c, d, e = siblings(None, 1, 1, None, None)
    assert [id(s) for s in flatten_samples([[a, [b, c]], [[d], e]])] == [id(s) for s in (a, b, c, d, e)]
    assert flatten_samples([]) == []
    for ids in ((None, None), (1, 2), (1, None)):
        with pytest.raises(ValueError, match="group 3: 2 samples split from one execution"):
            flatten_samples([[siblings(*ids), Sample()]])
    assert len(flatten_samples([siblings(None, None)])) == 2, "two samples of one prompt are two executions"
    with pytest.raises(TypeError, match="found dict at depth 2"):
        flatten_samples([[{}]])


def group(*rewards):
    return [Sample(reward=reward) for reward in rewards]


def test_reward_spread_filter():
    args = rollout_args()
    assert check_reward_nonzero_std(args, group(0, 1)).keep
    assert check_reward_nonzero_std(args, group(0.25, 0.25, 0.25)) == DynamicFilterOutput(False, "zero_std_0.2")
    assert not check_reward_nonzero_std(args, group(1.0, 1.0 + 1e-7)).keep
    assert check_reward_nonzero_std(args, group(1.0)) == DynamicFilterOutput(False, "zero_std_1.0")
    assert check_reward_nonzero_std_with_fallback(args, group(1, 1)) == DynamicFilterOutput(
        False, "zero_std_1.0", True
    )
    first, second = siblings(5, 5)
    first.reward, second.reward = 1, 1
    assert check_reward_nonzero_std(args, [[first, second], Sample(reward=0)]).keep
    keyed = rollout_args(reward_key="score")
    assert check_reward_nonzero_std(keyed, [Sample(reward={"score": i}) for i in range(2)]).keep


def test_filter_answers():
    assert call_dynamic_filter(None, None, []) == DynamicFilterOutput(True)
    assert call_dynamic_filter(lambda args, group: 0, None, []) == DynamicFilterOutput(False)
    assert call_dynamic_filter(lambda args, group: DynamicFilterOutput(True, "x"), None, []).reason == "x"
