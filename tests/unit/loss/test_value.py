"""The value loss and what it is fitted to, against loops over tokens in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.loss import compute_advantages_and_returns, get_values, loss_function
from tests.unit.loss.reference import make_args, make_batch, make_samples


def values_of(samples, seed, scale):
    """A critic's output for `make_batch(samples)`, three rows of padding included, near the values before."""
    g = torch.Generator().manual_seed(seed)
    stream = torch.randn(1, sum(s["total_lengths"] for s in samples) + 3, 1, generator=g)
    offset = 0
    for s in samples:
        first = offset + s["total_lengths"] - s["response_lengths"] - 1
        stream[0, first : first + s["response_lengths"], 0] *= scale
        stream[0, first : first + s["response_lengths"], 0] += s["values"]
        offset += s["total_lengths"]
    return stream.requires_grad_()


def naive(samples, stream, clip, per_token):
    """(loss, clipped fraction, gradient of the stream): sums over samples of masked sums or masked means."""
    loss = clipped = 0.0
    gradient, offset = torch.zeros(stream.size(1), dtype=torch.float64), 0
    for s in samples:
        weight = 1.0 if per_token else 1 / max(float(s["rollout_mask_sums"]), 1.0)
        for t in range(s["response_lengths"]):
            row = offset + s["total_lengths"] - s["response_lengths"] - 1 + t
            new, old, target = (float(x) for x in (stream[0, row, 0], s["values"][t], s["returns"][t]))
            near = min(max(new, old - clip), old + clip)
            plain, bounded = (new - target) ** 2, (near - target) ** 2
            if s["loss_masks"][t]:
                loss += weight * max(plain, bounded)
                clipped += weight * (abs(new - old) > clip)
                # beyond the clip the bounded term is constant, and it wins where the value has moved to the target
                gradient[row] = weight * 2 * (new - target) if plain >= bounded else 0.0
        offset += s["total_lengths"]
    return loss, clipped, gradient


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(2, 6),
    clip=st.sampled_from([0.0, 0.2, 5.0]),
    scale=st.sampled_from([0.01, 0.3, 3.0]),
    per_token=st.booleans(),
    zero_response=st.booleans(),
)
def test_loss_and_gradient_equal_a_loop_over_tokens(seed, count, clip, scale, per_token, zero_response):
    """Ragged samples, one fully masked, one perhaps without response; values within and far beyond the clip."""
    samples = make_samples(seed, count, zero_response=zero_response)
    batch, _ = make_batch(samples)
    stream = values_of(samples, seed + 1, scale)
    flags = {"loss_type": "value_loss", "value_clip": clip, "calculate_per_token_loss": per_token}
    loss, tokens, log = loss_function(make_args(**flags), batch, 1, count, stream)
    loss.backward()
    expected, clipped, gradient = naive(samples, stream.detach(), clip, per_token)
    scaled = 1 if per_token else 1 / count
    assert log["keys"] == ["value_loss", "value_clipfrac"]
    torch.testing.assert_close(
        log["values"][1:].double(), torch.tensor([expected, clipped]).double(), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(loss.double(), torch.tensor(expected * scaled).double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stream.grad[0, :, 0].double(), gradient * scaled, rtol=1e-4, atol=1e-5)
    assert int(tokens) == (sum(int(s["loss_masks"].sum()) for s in samples) if per_token else 1)


def test_a_value_belongs_to_the_position_before_its_token():
    """V of a response token is read where the model has seen everything before the token and not the token itself."""
    stream = torch.arange(12.0).reshape(1, 12, 1).to(torch.bfloat16)
    _, out = get_values(stream, args=make_args(), total_lengths=[5, 6], response_lengths=[2, 4])
    assert [x.tolist() for x in out["values"]] == [[2.0, 3.0], [6.0, 7.0, 8.0, 9.0]]
    assert all(x.dtype == torch.float32 for x in out["values"])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)]), st.sampled_from([0.0, 0.3]))
def test_returns_are_naive_gae_of_rewards_with_a_kl_penalty(seed, factors, kl_coef):
    """From log-probs, rewards, masks and values of whole ragged responses; a masked token's return is its value."""
    gamma, lambd = factors
    samples = make_samples(seed, 5)
    data = {key: [s[key] for s in samples] for key in samples[0]}
    data["rewards"] = [0.7 * i - 1 for i in range(5)]
    args = make_args(advantage_estimator="ppo", gamma=gamma, lambd=lambd, kl_coef=kl_coef)
    compute_advantages_and_returns(args, data)
    for i, s in enumerate(samples):
        actions = [t for t, unmasked in enumerate(s["loss_masks"]) if unmasked]
        expected, following, running = [0.0] * s["response_lengths"], 0.0, 0.0
        for t in reversed(actions):
            reward = -kl_coef * float(s["log_probs"][t] - s["ref_log_probs"][t])
            reward += data["rewards"][i] if t == actions[-1] else 0.0
            running = reward + gamma * following - float(s["values"][t]) + gamma * lambd * running
            expected[t], following = running, float(s["values"][t])
        got = data["advantages"][i].double()
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(data["returns"][i], data["advantages"][i] + s["values"])
