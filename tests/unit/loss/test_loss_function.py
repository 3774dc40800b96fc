"""The function Megatron calls: scaling over micro-batches, dispatch, recompute, and errors for non-finite losses."""

import pytest
import torch

from slime.backends.megatron_utils.loss import NonFiniteLossError, loss_function
from tests.unit.loss.reference import make_args, make_batch, make_samples, reference_grad, reference_log_probs


def step(samples, splits, gbs, **flags):
    """What Megatron makes of a step on one process: summed gradients of loss / micro-batches, or over all tokens."""
    args = make_args(**flags)
    batches = [make_batch([samples[i] for i in split]) for split in splits]
    results = [loss_function(args, batch, len(splits), gbs, logits) for batch, logits in batches]
    total = 0
    for loss, normaliser, _ in results:
        total = total + (loss if args.calculate_per_token_loss else loss / normaliser.clamp(min=1) / len(splits))
    total.backward()
    tokens = sum(int(normaliser) for _, normaliser, _ in results)
    scale = 1 / max(tokens, 1) if args.calculate_per_token_loss else 1
    grads = {}
    for split, (_, logits) in zip(splits, batches, strict=True):
        rows = iter(logits.grad.squeeze(0).split([samples[i]["total_lengths"] for i in split] + [3]))
        grads |= {i: next(rows) * scale for i in split}
    keys, values = results[0][2]["keys"], sum(log["values"] for *_, log in results)
    return torch.cat([grads[i] for i in sorted(grads)]), dict(zip(["n", *keys], values.tolist(), strict=True))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_and_metrics_do_not_depend_on_the_micro_batch_split(per_token, estimator, recompute):
    samples = make_samples(1, 6)
    flags = {
        "calculate_per_token_loss": per_token,
        "advantage_estimator": estimator,
        "entropy_coef": 0.02,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
    }
    whole_grad, whole = step(samples, [[0, 1, 2, 3, 4, 5]], 4, **flags)
    for splits in ([[0, 1], [2, 3, 4], [5]], [[5], [1], [3, 0], [4, 2]]):
        grad, metrics = step(samples, splits, 4, recompute_loss_function=recompute, **flags)
        torch.testing.assert_close(grad, whole_grad, rtol=1e-5, atol=1e-8)
        assert metrics == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert metrics["n"] == (sum(int(s["loss_masks"].sum()) for s in samples) if per_token else 0)


@pytest.mark.parametrize("per_token", [False, True])
def test_sft_step_is_the_mean_negative_log_likelihood(per_token):
    """Temperature is a matter of sampling; it does not change what supervised training fits."""
    samples = make_samples(2, 5)
    flags = {"loss_type": "sft_loss", "calculate_per_token_loss": per_token, "rollout_temperature": 0.5}
    grad, metrics = step(samples, [[0, 1], [2, 3, 4]], 5, **flags)
    total = sum(
        -(s["loss_masks"] * new).sum() / (1 if per_token else s["rollout_mask_sums"].clamp(min=1))
        for s, (new, _) in zip(samples, reference_log_probs(samples), strict=True)
    )
    (total / (sum(int(s["loss_masks"].sum()) for s in samples) if per_token else 5)).backward()
    torch.testing.assert_close(grad.double(), reference_grad(samples)[0, :-3], rtol=1e-4, atol=1e-7)
    assert metrics["loss"] == pytest.approx(float(total), rel=1e-5)


def test_value_loss_takes_the_worse_of_clipped_and_plain():
    samples = make_samples(3, 3)
    batch, _ = make_batch(samples)
    values = torch.randn(1, sum(batch["total_lengths"]) + 3, 1, requires_grad=True)
    _, _, log = loss_function(make_args(loss_type="value_loss"), batch, 1, 3, values)
    expected, clipfrac, offset = 0.0, 0.0, 0
    for s in samples:
        n, m = s["total_lengths"], s["response_lengths"]
        for t in range(m):
            new, old = float(values[0, offset + n - m - 1 + t, 0]), float(s["values"][t])
            clipped = old + min(max(new - old, -0.2), 0.2)
            weight = float(s["loss_masks"][t]) / max(float(s["rollout_mask_sums"]), 1)
            expected += weight * max((clipped - float(s["returns"][t])) ** 2, (new - float(s["returns"][t])) ** 2)
            clipfrac += weight * (abs(new - old) > 0.2)
        offset += n
    assert log["keys"] == ["value_loss", "value_clipfrac"]
    assert log["values"].tolist() == pytest.approx([0.0, expected, clipfrac], rel=1e-5)


def constant_loss(args, batch, logits, reducer):
    return torch.zeros(()), {"mine": 4}


def mean_logit_loss(args, batch, logits, reducer):
    return logits.mean(), {"mine": logits.detach().mean()}


def infinite_loss(args, batch, logits, reducer):
    return logits.sum() * float("inf"), {}


def custom(name):
    return make_args(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.{name}")


def test_custom_loss_function():
    batch, logits = make_batch(make_samples(3, 3))
    loss, normaliser, log = loss_function(custom("mean_logit_loss"), batch, 4, 8, logits)
    assert float(loss) == pytest.approx(float(logits.mean()) * 4 / 8) and int(normaliser) == 1
    assert log["keys"] == ["mine"] and not log["values"].requires_grad


def test_rank_without_response_tokens_still_runs_backward():
    batch, logits = make_batch(make_samples(3, 1, zero_response=True))
    loss_function(custom("constant_loss"), batch, 1, 1, logits)[0].backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_fully_masked_micro_batch_counts_no_token_and_gives_no_gradient():
    batch, logits = make_batch(make_samples(3, 2)[1:])
    loss, normaliser, log = loss_function(make_args(calculate_per_token_loss=True), batch, 1, 1, logits)
    loss.backward()
    assert int(normaliser) == 0 and float(log["values"][0]) == 0
    assert normaliser.dtype == torch.int32 and torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_loss_names_samples_lists_and_step(bad):
    samples = make_samples(4, 4)
    for s in samples:
        s["loss_masks"] = torch.ones_like(s["loss_masks"])
    samples[2]["advantages"] = samples[2]["advantages"] * bad
    samples[3]["logits"] = samples[3]["logits"].clone()
    samples[3]["logits"][-2] = float("nan")
    batch, logits = make_batch(samples)
    batch["step_name"] = "rollout 7 step 1"
    with pytest.raises(NonFiniteLossError) as error:
        loss_function(make_args(), batch, 1, 4, logits)
    text = str(error.value)
    assert "rollout 7 step 1" in text and "[100, 101, 102, 103]" in text
    assert "sample 102 (advantages)" in text and "sample 103 (the model's log-probabilities)" in text
    assert "sample 100 (" not in text and "sample 101 (" not in text


def test_non_finite_custom_loss_says_that_the_inputs_are_fine():
    batch, logits = make_batch(make_samples(4, 2))
    with pytest.raises(NonFiniteLossError, match="no per-token input is"):
        loss_function(custom("infinite_loss"), batch, 1, 4, logits)


def test_unknown_loss_type_is_refused():
    batch, logits = make_batch(make_samples(4, 2))
    with pytest.raises(ValueError, match="choose policy_loss"):
        loss_function(make_args(loss_type="ppo"), batch, 1, 4, logits)
