"""Log-probabilities, entropies and their gradients against float64 autograd of log_softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_values
from tests.unit.loss.reference import make_args, make_batch, make_samples, reference_grad, reference_log_probs


def compute(batch, logits, with_entropy=True, **flags):
    top_p = {k: flags.pop(k) for k in ("top_p_token_ids", "top_p_token_offsets") if k in flags}
    _, out = get_log_probs_and_entropy(
        logits,
        args=make_args(**flags),
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=with_entropy,
        **top_p,
    )
    return out


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 6),
    temperature=st.sampled_from([1.0, 0.7, 1.9]),
    chunk=st.sampled_from([-1, 1, 3, 7, 1000]),
    zero_response=st.booleans(),
)
def test_values_and_gradients_equal_float64_log_softmax(seed, count, temperature, chunk, zero_response):
    samples = make_samples(seed, count, zero_response=zero_response)
    batch, logits = make_batch(samples)
    out = compute(batch, logits, rollout_temperature=temperature, log_probs_chunk_size=chunk, entropy_coef=0.1)
    expected = reference_log_probs(samples, temperature)
    total, expected_total = logits.sum() * 0, 0
    for i, (log_probs, entropy) in enumerate(expected):
        torch.testing.assert_close(out["log_probs"][i].double(), log_probs, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(out["entropy"][i].double(), entropy, rtol=1e-5, atol=2e-6)
        weight = torch.linspace(0.5, 1.5, len(log_probs))
        total = total + (out["log_probs"][i] * weight).sum() + (out["entropy"][i] * weight.flip(0)).sum()
        expected_total = expected_total + (log_probs * weight).sum() + (entropy * weight.flip(0)).sum()
    before = logits.detach().clone()
    total.backward()
    expected_total.backward()
    torch.testing.assert_close(logits.grad.double(), reference_grad(samples), rtol=1e-4, atol=2e-6)
    assert torch.equal(before, logits.detach()), "the model's logits must stay as they are"


def test_gradcheck_in_float64():
    """Also shows that backward can run twice: it must not overwrite what it saved."""
    batch, logits = make_batch(make_samples(3, 3, vocab=7))

    def f(x):
        out = compute(batch, x, rollout_temperature=1.3, entropy_coef=0.1)
        return torch.cat(out["log_probs"]), torch.cat(out["entropy"])

    assert torch.autograd.gradcheck(f, logits.detach().double().requires_grad_())


def test_extreme_logits_stay_finite():
    """A certain token: log p 0, entropy 0, gradients 0; an impossible one: log p -2e4."""
    logits = torch.zeros(1, 3, 5)
    logits[0, 0, 2], logits[0, 1, 2] = 1e4, 1e4
    logits[0, 1, 0] = -1e4
    logits.requires_grad_()
    batch = {"unconcat_tokens": [torch.tensor([1, 2, 0])], "total_lengths": [3], "response_lengths": [2]}
    out = compute(batch, logits, entropy_coef=1.0)
    assert out["log_probs"][0].tolist() == [0.0, -2e4] and out["entropy"][0].tolist() == [0.0, 0.0]
    (out["log_probs"][0].sum() + out["entropy"][0].sum()).backward()
    assert torch.isfinite(logits.grad).all()


def test_entropy_without_coefficient_is_only_a_metric():
    batch, logits = make_batch(make_samples(0, 2))
    assert not torch.cat(compute(batch, logits)["entropy"]).requires_grad
    assert torch.cat(compute(batch, logits, entropy_coef=0.1)["entropy"]).requires_grad


def test_nothing_of_the_size_of_a_softmax_is_saved():
    """Between forward and backward there are the logits themselves and a few numbers a row."""
    batch, logits = make_batch(make_samples(5, 4, vocab=4096))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        compute(batch, logits, entropy_coef=0.1)
    wide = [x for x in saved if x.dim() == 2]
    assert [x.data_ptr() for x in wide] == [logits.data_ptr()]


def test_no_response_token_keeps_the_graph_connected():
    batch, logits = make_batch(make_samples(1, 1, zero_response=True))
    out = compute(batch, logits, with_entropy=False)
    out["log_probs"][0].sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_bfloat16_logits_are_computed_in_float32():
    samples = make_samples(2, 3)
    for s in samples:
        s["logits"] = s["logits"].bfloat16()
    batch, logits = make_batch(samples)
    logits = logits.detach().bfloat16().requires_grad_()
    out = compute(batch, logits)
    for got, (expected, _) in zip(out["log_probs"], reference_log_probs(samples), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)
    torch.cat(out["log_probs"]).sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_too_few_positions_are_refused():
    batch, logits = make_batch(make_samples(2, 3))
    with pytest.raises(ValueError, match="positions for"):
        compute(batch, logits[:, :5])


def test_top_p_replay_restricts_the_softmax_to_the_record():
    """Kept ids plus the token itself; an empty record leaves the token alone (0); None leaves the row unrestricted."""
    samples = make_samples(11, 3)
    g = torch.Generator().manual_seed(0)
    ids, offsets, expected = [], [], []
    plain = reference_log_probs(samples)
    for i, s in enumerate(samples):
        if i == 2:
            ids.append(None), offsets.append(None), expected.append(plain[2][0].detach())
            continue
        p, kept_ids, bounds, values = s["total_lengths"] - s["response_lengths"], [], [0], []
        for r in range(s["response_lengths"]):
            kept = torch.randperm(24, generator=g)[: 0 if r == 0 else 6]
            kept_ids.append(kept)
            bounds.append(bounds[-1] + len(kept))
            token = s["tokens"][p + r]
            allowed = torch.unique(torch.cat([kept, token[None]]))
            row = s["logits"][p - 1 + r].double()
            values.append(row[token] - row[allowed].logsumexp(0))
        ids.append(torch.cat(kept_ids).int()), offsets.append(torch.tensor(bounds, dtype=torch.int32))
        expected.append(torch.stack(values))
    batch, logits = make_batch(samples)
    out = compute(batch, logits, rollout_top_p=0.9, top_p_token_ids=ids, top_p_token_offsets=offsets, entropy_coef=0.1)
    for got, want in zip(out["log_probs"], expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)
    for got, (_, entropy) in zip(out["entropy"], plain, strict=True):
        torch.testing.assert_close(got.double(), entropy, rtol=1e-5, atol=2e-6)
    torch.cat(out["log_probs"]).sum().backward()
    assert torch.isfinite(logits.grad).all()
    with pytest.raises(ValueError, match="--rollout-top-p"):
        compute(batch, logits, rollout_top_p=0.9)


def test_values_are_the_rows_that_score_response_tokens():
    values = torch.arange(10.0).view(1, 10, 1)
    _, out = get_values(values, args=make_args(), total_lengths=[4, 5], response_lengths=[2, 4])
    assert [x.tolist() for x in out["values"]] == [[1.0, 2.0], [4.0, 5.0, 6.0, 7.0]]
