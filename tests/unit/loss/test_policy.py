"""Every objective against a ten-line float64 version: loss, metrics and gradients of the logits."""

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import ParallelState
from slime.backends.megatron_utils.loss import compute_approx_kl, policy_loss_function
from slime.backends.megatron_utils.loss.policy import clipped_loss
from slime.backends.megatron_utils.loss.reduction import make_reducer
from tests.unit.loss.reference import make_args, make_batch, make_samples, reference_grad, reference_log_probs


def run(batch, logits, **flags):
    args = make_args(**flags)
    return policy_loss_function(args, batch, logits, make_reducer(args, batch, batch["loss_masks"], ParallelState()))


def reference_loss(samples, a):
    """Sum over samples of mask-weighted token losses over the rollout's mask total, written from the definitions."""
    total = 0
    for s, (new, entropy) in zip(samples, reference_log_probs(samples, a.rollout_temperature), strict=True):
        m, adv = s["loss_masks"].double(), s["advantages"].double()
        old = (s["rollout_log_probs"] if a.use_rollout_logprobs else s["log_probs"]).double()
        mean_log_ratio = (m * (new - old)).sum() / m.sum().clamp(min=1)
        r = (new - old).exp() if a.advantage_estimator != "gspo" else mean_log_ratio.exp().expand(len(m))
        low, high = 1 - a.eps_clip, 1 + a.eps_clip_high
        if a.advantage_estimator == "cispo":
            pg = -r.detach().clamp(low, high) * adv * new
        else:
            pg = torch.max(-r * adv, -r.clamp(low, high) * adv)
            if a.eps_clip_c:
                pg = torch.where(adv < 0, torch.min(-a.eps_clip_c * adv, pg), pg)
        if a.use_opsm and -mean_log_ratio > a.opsm_delta:
            pg = pg * (adv >= 0)
        if a.use_tis:
            w = (s["log_probs"].double() - s["rollout_log_probs"].double()).exp()
            if a.custom_tis_function_path:
                pg = pg * w * ((w >= a.tis_clip_low) & (w <= a.tis_clip))
            else:
                pg = pg * w.clamp(a.tis_clip_low, a.tis_clip)
        loss = pg - a.entropy_coef * entropy
        if a.use_kl_loss:
            d = new - s["ref_log_probs"].double()
            kl = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d, "low_var_kl": (-d).exp() - 1 + d}[a.kl_loss_type]
            kl = kl * (new - old).exp() if a.use_unbiased_kl else kl
            loss = loss + a.kl_loss_coef * (kl.clamp(-10, 10) if a.kl_loss_type == "low_var_kl" else kl)
        total = total + (m * loss).sum() / (1 if a.calculate_per_token_loss else s["rollout_mask_sums"].clamp(min=1))
    return total


ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
OBJECTIVES = {
    "grpo": {},
    "per_token": {"calculate_per_token_loss": True},
    "temperature_entropy": {"rollout_temperature": 0.8, "entropy_coef": 0.01},
    "dual_clip": {"eps_clip": 0.05, "eps_clip_high": 0.05, "eps_clip_c": 1.2},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.1},
    "rollout_logprobs": {"use_rollout_logprobs": True},
    "opsm": {"use_opsm": True, "opsm_delta": 0.01},
    "gspo_opsm": {"advantage_estimator": "gspo", "use_opsm": True, "opsm_delta": 0.01},
    "tis": {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9},
    "icepop": {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.8, "custom_tis_function_path": ICEPOP},
    **{
        f"kl_{k}": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": k}
        for k in ("k1", "k2", "k3", "low_var_kl")
    },
    "kl_unbiased": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradients_equal_the_definition(name, seed):
    samples = make_samples(seed, 6)
    batch, logits = make_batch(samples)
    loss, metrics = run(batch, logits, **OBJECTIVES[name])
    expected = reference_loss(samples, make_args(**OBJECTIVES[name]))
    assert float(loss) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    assert metrics["loss"] is loss
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad.double(), reference_grad(samples), rtol=1e-3, atol=1e-6)


def test_metrics_are_reduced_per_token_values():
    samples = make_samples(7, 5)
    batch, logits = make_batch(samples)
    _, metrics = run(batch, logits, use_tis=True, use_opsm=True, use_kl_loss=True, tis_clip=1.1)
    expected = dict.fromkeys(("pg_clipfrac", "ppo_kl", "ois", "tis", "tis_abs", "tis_clipfrac", "opsm_clipfrac"), 0.0)
    expected |= dict.fromkeys(("kl_loss", "entropy_loss", "train_rollout_logprob_abs_diff"), 0.0)
    for s, (new, entropy) in zip(samples, reference_log_probs(samples), strict=True):
        m = s["loss_masks"].double() / s["rollout_mask_sums"].clamp(min=1)
        k, adv = s["log_probs"] - new, s["advantages"]
        r = (-k).exp()
        w = (s["log_probs"] - s["rollout_log_probs"]).double().exp()
        seq_kl = (s["loss_masks"] * k).sum() / s["loss_masks"].sum().clamp(min=1)
        clipped = -r.clamp(0.8, 1.28) * adv > -r * adv
        for key, value in {
            "pg_clipfrac": clipped,
            "ppo_kl": k,
            "ois": r,
            "tis": w,
            "tis_abs": (w - 1).abs(),
            "tis_clipfrac": (w > 1.1) | (w < 0),
            "opsm_clipfrac": (adv < 0) & (seq_kl > 1e-4),
            "kl_loss": new - s["ref_log_probs"],
            "entropy_loss": entropy,
            "train_rollout_logprob_abs_diff": (s["log_probs"] - s["rollout_log_probs"]).abs(),
        }.items():
            expected[key] += float((m * value.double()).sum())
    for key, value in expected.items():
        assert float(metrics[key]) == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_without_old_log_probs_every_ratio_is_one():
    batch, logits = make_batch(make_samples(3, 4))
    batch["log_probs"] = None
    loss, metrics = run(batch, logits)
    assert float(metrics["pg_clipfrac"]) == 0 and float(metrics["ppo_kl"]) == 0
    loss.backward()
    assert logits.grad.abs().sum() > 0


def test_rejected_tokens_lower_the_weight_instead_of_renormalising():
    """A correction's masks change sums, not denominators."""
    batch, logits = make_batch(make_samples(5, 4))
    plain, _ = run(batch, logits)
    half, _ = run(batch, logits, use_tis=True, custom_tis_function_path=f"{__name__}.reject_all_but_first_sample")
    one = {**batch, "loss_masks": [m if i == 0 else m * 0 for i, m in enumerate(batch["loss_masks"])]}
    only_first, _ = run(one, logits)
    assert float(half) == pytest.approx(float(only_first)) and float(half) != pytest.approx(float(plain))


def reject_all_but_first_sample(*, args, pg_loss, loss_masks, **rest):
    assert len(rest["train_log_probs"]) == len(rest["rollout_log_probs"]) == len(loss_masks)
    return pg_loss, [m if i == 0 else m * 0 for i, m in enumerate(loss_masks)], {"mine": torch.ones_like(pg_loss)}


def double_loss(*, pg_loss, loss_masks, **_):
    return pg_loss * 2, [m * 0 for m in loss_masks], {"mine": torch.ones_like(pg_loss)}


def test_mismatch_metrics_alone_do_not_change_the_loss():
    batch, logits = make_batch(make_samples(5, 4))
    plain, _ = run(batch, logits)
    same, metrics = run(batch, logits, get_mismatch_metrics=True, custom_tis_function_path=f"{__name__}.double_loss")
    assert float(same) == float(plain) and "mine" in metrics and "ois" in metrics


def test_tool_tokens_with_placeholder_log_probs_cannot_overflow_a_correction():
    samples = make_samples(6, 4)
    for s in samples:
        s["rollout_log_probs"] = torch.where(s["loss_masks"] == 0, -1e6, s["rollout_log_probs"])
    batch, logits = make_batch(samples)
    loss, metrics = run(batch, logits, use_tis=True, custom_tis_function_path=ICEPOP)
    assert torch.isfinite(loss) and torch.isfinite(metrics["tis"])


def sum_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    assert len(total_lengths) == len(loss_masks) and calculate_per_token_loss is False
    return lambda x: x.sum() / 1000


def test_custom_reducer_replaces_the_policy_term_only():
    batch, logits = make_batch(make_samples(5, 4))
    _, plain = run(batch, logits, entropy_coef=0.5)
    loss, metrics = run(
        batch, logits, entropy_coef=0.5, custom_pg_loss_reducer_function_path=f"{__name__}.sum_reducer"
    )
    assert float(metrics["entropy_loss"]) == float(plain["entropy_loss"])
    assert float(metrics["pg_loss"]) != pytest.approx(float(plain["pg_loss"]))
    assert float(loss) == pytest.approx(float(metrics["pg_loss"] - 0.5 * metrics["entropy_loss"]))


def test_flags_that_lack_their_data_are_named():
    for key, flags in {
        "advantages": {},
        "ref_log_probs": {"use_kl_loss": True},
        "rollout_log_probs": {"use_tis": True},
    }.items():
        batch, logits = make_batch(make_samples(5, 2))
        batch[key] = None
        with pytest.raises(ValueError, match=key):
            run(batch, logits, **flags)
    with pytest.raises(ValueError, match="--eps-clip-c 0.9"):
        clipped_loss(torch.ones(1), torch.ones(1), 0.2, 0.2, 0.9)
    with pytest.raises(ValueError, match="choose k1"):
        compute_approx_kl(torch.zeros(1), torch.zeros(1), "k4")
