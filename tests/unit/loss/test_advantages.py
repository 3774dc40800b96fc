"""Estimators against naive recurrences in float64; masks, whitening and hooks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.cp_utils import ParallelState
from slime.backends.megatron_utils.loss import compute_advantages_and_returns
from slime.backends.megatron_utils.loss.advantages import discounted_suffix_sum, gae, whiten
from tests.unit.loss.reference import make_args, make_samples


def rollout(seed=0, count=5):
    samples = make_samples(seed, count)
    data = {key: [s[key] for s in samples] for key in samples[0]}
    data["rewards"] = [0.5 * i - 1 for i in range(count)]
    del data["advantages"], data["returns"]
    return data


def run(data, **flags):
    compute_advantages_and_returns(make_args(**flags), data)
    return data


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_estimators_spread_the_reward(estimator):
    data = run(rollout(), advantage_estimator=estimator)
    for key in ("advantages", "returns"):
        for value, reward, length in zip(data[key], data["rewards"], data["response_lengths"], strict=True):
            assert value.tolist() == [reward] * length
    assert all((kl == 0).all() for kl in data["kl"])


def test_shapes_come_from_lengths_when_there_are_no_log_probs():
    data = rollout()
    for key in ("log_probs", "rollout_log_probs", "values"):
        del data[key]
    assert [len(a) for a in run(data)["advantages"]] == data["response_lengths"]


@pytest.mark.parametrize("source", ["log_probs", "rollout_log_probs"])
def test_reinforce_baseline_subtracts_the_kl_of_the_chosen_policy(source):
    data = run(
        rollout(),
        advantage_estimator="reinforce_plus_plus_baseline",
        kl_coef=0.3,
        use_rollout_logprobs=source == "rollout_log_probs",
    )
    for i, advantage in enumerate(data["advantages"]):
        kl = data[source][i] - data["ref_log_probs"][i]
        torch.testing.assert_close(advantage, data["rewards"][i] - 0.3 * kl)
        torch.testing.assert_close(data["kl"][i], kl)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_plus_plus_equals_the_naive_recurrence(gamma):
    """Reward on the last unmasked token; a fully masked sample (number 1) has zeros."""
    data = run(rollout(4), advantage_estimator="reinforce_plus_plus", kl_coef=0.2, kl_loss_type="k2", gamma=gamma)
    for i, got in enumerate(data["advantages"]):
        mask = data["loss_masks"][i].tolist()
        kl = ((data["log_probs"][i] - data["ref_log_probs"][i]).double() ** 2 / 2).tolist()
        running, expected = 0.0, []
        last = max((t for t, m in enumerate(mask) if m), default=None)
        for t in reversed(range(len(mask))):
            running = -0.2 * kl[t] * mask[t] + (data["rewards"][i] if t == last else 0) + gamma * running
            expected.insert(0, running)
        assert got.tolist() == pytest.approx(expected, abs=1e-5)
    assert (data["advantages"][1] == 0).all()


def naive_gae(rewards, values, mask, gamma, lambd):
    """Backward recurrence over the unmasked tokens."""
    actions = [t for t, m in enumerate(mask) if m]
    advantages, running, next_value = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(actions):
        running = rewards[t] + gamma * next_value - values[t] + gamma * lambd * running
        advantages[t], next_value = running, values[t]
    return advantages


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 0.5)]), st.booleans())
def test_gae_equals_the_naive_recurrence(seed, factors, long):
    """Ragged rows, longer than one scan chunk too, with masked tokens inside."""
    g = torch.Generator().manual_seed(seed)
    lengths = [int(torch.randint(0, 400 if long else 9, (), generator=g)) for _ in range(4)]
    masks = [(torch.rand(n, generator=g) < 0.8).int() for n in lengths]
    rewards = [torch.randn(n, generator=g) for n in lengths]
    values = [torch.randn(n, generator=g) for n in lengths]
    advantages, returns = gae(rewards, values, masks, *factors)
    for a, r, x, v, m in zip(advantages, returns, rewards, values, masks, strict=True):
        expected = naive_gae(x.tolist(), v.tolist(), m.tolist(), *factors)
        assert a.tolist() == pytest.approx(expected, abs=2e-4 if long else 1e-5)
        torch.testing.assert_close(r, a + v)


def test_ppo_puts_the_reward_on_the_last_action_even_when_tool_tokens_follow():
    data = rollout(count=1)
    data.update(total_lengths=[7], response_lengths=[4], values=[torch.zeros(4)], rewards=[2.0])
    data["loss_masks"] = [torch.tensor([1, 0, 1, 0])]
    run(data, advantage_estimator="ppo", gamma=0.5, lambd=1.0)
    assert data["advantages"][0].tolist() == [1.0, 0.0, 2.0, 0.0]


@given(st.integers(0, 500), st.sampled_from([1.0, 0.97, 0.0]))
@settings(max_examples=20, deadline=None)
def test_suffix_sum(length, discount):
    x = torch.randn(2, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    y, running = torch.zeros_like(x), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(length)):
        running = y[:, t] = x[:, t] + discount * running
    torch.testing.assert_close(discounted_suffix_sum(x, discount), y)


def test_whitening_is_masked_bessel_corrected_and_stable_for_nearly_equal_values():
    values = [torch.tensor([1000.0, 1000.001, 5.0]), torch.tensor([1000.002])]
    masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    kept = torch.tensor([1000.0, 1000.001, 1000.002]).double()
    expected = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    got = whiten(values, masks, ParallelState())
    assert [len(x) for x in got] == [3, 1]
    assert torch.cat(got)[[0, 1, 3]].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert all(math.isfinite(x) for x in whiten([torch.full((4,), 0.1)], [torch.ones(4)], ParallelState())[0])
    with pytest.raises(ValueError, match="--normalize-advantages"):
        whiten(values, [torch.zeros(3), torch.zeros(1)], ParallelState())


def test_whitening_through_the_entry_point_leaves_returns_alone():
    data = run(rollout(), normalize_advantages=True)
    x = torch.cat(data["advantages"])[torch.cat(data["loss_masks"]) != 0]
    assert float(x.mean()) == pytest.approx(0, abs=1e-5) and float(x.var()) == pytest.approx(1, abs=1e-4)
    assert torch.cat(data["returns"]).unique().tolist() == sorted(data["rewards"])


def test_distillation_lowers_advantages_by_the_reverse_kl():
    data = rollout()
    data["teacher_log_probs"] = [x - 0.25 for x in data["log_probs"]]
    run(data, use_opd=True, opd_kl_coef=2.0)
    for advantage, reverse_kl, reward in zip(data["advantages"], data["opd_reverse_kl"], data["rewards"], strict=True):
        torch.testing.assert_close(reverse_kl, torch.full_like(reverse_kl, 0.25))
        torch.testing.assert_close(advantage, torch.full_like(advantage, reward - 0.5))


def test_missing_inputs_are_named():
    for key, flags in {
        "ref_log_probs": {"kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"},
        "log_probs": {"kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"},
        "values": {"advantage_estimator": "ppo"},
        "teacher_log_probs": {"use_opd": True},
    }.items():
        data = rollout()
        data.pop(key, None)
        with pytest.raises(ValueError, match=key):
            run(data, **flags)
    with pytest.raises(ValueError, match="choose grpo"):
        run(rollout(), advantage_estimator="grop")


def good_advantage(args, data):
    data["advantages"] = data["returns"] = [torch.full_like(k, 7.0) for k in data["kl"]]


def lazy_advantage(args, data):
    data["advantages"] = data["kl"]


def test_custom_advantage_function():
    data = run(rollout(), custom_advantage_function_path=f"{__name__}.good_advantage")
    assert all((a == 7).all() for a in data["advantages"])
    with pytest.raises(ValueError, match="did not set returns"):
        run(rollout(), custom_advantage_function_path=f"{__name__}.lazy_advantage")
