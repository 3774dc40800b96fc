"""Log-probabilities straight from hidden states and a head: values, both gradients, memory, and the losses on top."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime.backends.megatron_utils.cp_utils import ParallelState
from slime.backends.megatron_utils.loss import NonFiniteLossError, get_log_probs_and_entropy, loss_function
from slime.backends.megatron_utils.loss.vocab_parallel import KeptVocabulary, vocab_parallel_log_probs
from tests.unit.loss.reference import VOCAB, make_args, make_batch, make_samples

ALONE = ParallelState()
HIDDEN, PADDED = 10, VOCAB + 8


@dataclass
class Head:
    """What the last stage returns: `Scores` over plain tensors."""

    hidden: torch.Tensor
    weight: torch.Tensor
    vocab_size: int = VOCAB
    device = torch.device("cpu")

    def projection(self):
        return self.hidden, {"weight": self.weight, "vocab_size": self.vocab_size}

    def logits(self):
        logits = (self.hidden @ self.weight.t()).unsqueeze(0).float()
        padding = torch.arange(logits.size(-1)) >= self.vocab_size
        return logits.masked_fill(padding, -1e9)


def make_head(samples, seed=0, dtype=torch.float32):
    """A head over random hidden states of the packed samples (three rows of padding at the end), and a twin of it."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(s["total_lengths"] for s in samples) + 3
    values = torch.randn(rows, HIDDEN, generator=g), torch.randn(PADDED, HIDDEN, generator=g)
    return [Head(*(v.to(dtype).requires_grad_() for v in values)) for _ in range(2)]


def assert_same(mine, other, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(mine.hidden.grad, other.hidden.grad, rtol=rtol, atol=atol)
    torch.testing.assert_close(mine.weight.grad, other.weight.grad, rtol=rtol, atol=atol)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 5),
    temperature=st.sampled_from([1.0, 0.7, 1.9]),
    chunk=st.sampled_from([-1, 1, 3, 7, 1000]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
    zero_response=st.booleans(),
)
def test_values_and_gradients_equal_whole_logits_in_float64(
    seed, count, temperature, chunk, entropy_coef, zero_response
):
    samples = make_samples(seed, count, zero_response=zero_response)
    batch, _ = make_batch(samples)
    head, _ = make_head(samples, seed)
    exact = Head(head.hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_())
    args = make_args(rollout_temperature=temperature, log_probs_chunk_size=chunk, entropy_coef=entropy_coef)
    _, out = get_log_probs_and_entropy(
        head,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    whole = ((exact.hidden @ exact.weight.t())[:, :VOCAB] / temperature).log_softmax(-1)
    start, loss, exact_loss = 0, 0, 0
    for i, s in enumerate(samples):
        n, m = s["total_lengths"], s["response_lengths"]
        log_p = whole[start + n - m - 1 : start + n - 1]
        log_probs = log_p.gather(1, s["tokens"][n - m :, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(out["log_probs"][i].double(), log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out["entropy"][i].double(), entropy, rtol=1e-5, atol=1e-5)
        slope = torch.linspace(0.5, 1.5, m)
        loss = loss + out["log_probs"][i] @ slope
        exact_loss = exact_loss + log_probs @ slope.double()
        if entropy_coef:
            loss = loss + out["entropy"][i] @ slope.flip(0)
            exact_loss = exact_loss + entropy @ slope.flip(0).double()
        start += n
    loss.backward()
    (exact_loss + 0 * whole.sum()).backward()
    torch.testing.assert_close(head.hidden.grad.double(), exact.hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.weight.grad.double(), exact.weight.grad, rtol=1e-4, atol=1e-5)
    assert not head.weight.grad[VOCAB:].any(), "padding gets no gradient"


@pytest.mark.parametrize("with_keep", [False, True])
def test_gradcheck_in_float64(with_keep):
    """Over two chunks; kept sets restrict the log-probability, not the entropy."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 3, generator=g, dtype=torch.float64).requires_grad_() for n in (6, 7))
    rows, targets = torch.tensor([4, 0, 3, 1]), torch.tensor([1, 0, 4, 2])
    keep = None
    if with_keep:
        whole = torch.tensor([False, True, False, False])
        keep = KeptVocabulary(torch.tensor([0, 0, 2, 3]), torch.tensor([1, 3, 0, 4]), whole)

    def f(h, w):
        options = {"vocab_size": 5, "temperature": 1.3, "chunk_size": 3, "keep": keep, "parallel": ALONE}
        return vocab_parallel_log_probs(h, rows, targets, weight=w, with_entropy=True, **options)

    assert torch.autograd.gradcheck(f, (hidden, weight))


def test_top_p_records_give_the_same_from_a_head_and_from_logits():
    samples = make_samples(11, 4)
    batch, _ = make_batch(samples)
    g = torch.Generator().manual_seed(0)
    records = {"rollout_top_p_token_ids": [], "rollout_top_p_token_offsets": []}
    for i, s in enumerate(samples):
        sizes = torch.randint(0, 6, (s["response_lengths"],), generator=g)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        ids = torch.randint(0, VOCAB, (int(bounds[-1]),), generator=g)
        records["rollout_top_p_token_ids"].append(None if i == 2 else ids)
        records["rollout_top_p_token_offsets"].append(None if i == 2 else bounds)
    args = make_args(rollout_top_p=0.9, entropy_coef=0.1, log_probs_chunk_size=4)
    head, twin = make_head(samples)
    loss, _, log = loss_function(args, batch | records, 1, 4, head)
    other, _, other_log = loss_function(args, batch | records, 1, 4, twin.logits())
    loss.backward(), other.backward()
    torch.testing.assert_close(log["values"], other_log["values"], rtol=1e-5, atol=1e-5)
    assert_same(head, twin)


LOSSES = {
    "policy": {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"},
    "gspo, sequence masking": {"advantage_estimator": "gspo", "use_opsm": True, "opsm_delta": 0.01},
    "importance sampling": {"advantage_estimator": "cispo", "use_tis": True, "rollout_temperature": 0.8},
    "recomputed": {"recompute_loss_function": True, "calculate_per_token_loss": True},
    "supervised": {"loss_type": "sft_loss"},
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_the_same_from_a_head_and_from_logits(name):
    samples = make_samples(3, 5)
    batch, _ = make_batch(samples)
    args = make_args(**LOSSES[name], log_probs_chunk_size=5)
    head, twin = make_head(samples)
    loss, normaliser, log = loss_function(args, batch, 2, 5, head)
    other, other_normaliser, other_log = loss_function(args, batch, 2, 5, twin.logits())
    loss.backward(), other.backward()
    assert log["keys"] == other_log["keys"] and torch.equal(normaliser, other_normaliser)
    torch.testing.assert_close(log["values"], other_log["values"], rtol=1e-5, atol=1e-5)
    assert_same(head, twin)


def custom_loss(args, batch, logits, reducer):
    assert logits.shape == (1, sum(batch["total_lengths"]) + 3, PADDED) and logits.dtype == torch.float32
    assert (logits[..., VOCAB:] < -1e8).all()
    return logits[..., :VOCAB].square().mean(), {}


def test_a_custom_loss_gets_logits():
    samples = make_samples(3, 2)
    batch, _ = make_batch(samples)
    head, twin = make_head(samples)
    args = make_args(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.custom_loss")
    loss_function(args, batch, 1, 1, head)[0].backward()
    twin.logits()[..., :VOCAB].square().mean().backward()
    assert_same(head, twin)


def test_a_rank_without_response_tokens_still_runs_backward_into_the_head():
    samples = make_samples(3, 1, zero_response=True)
    batch, _ = make_batch(samples)
    batch["advantages"], batch["log_probs"] = [torch.zeros(0)], [torch.zeros(0)]
    head, _ = make_head(samples)
    loss_function(make_args(), batch, 1, 1, head)[0].backward()
    assert torch.equal(head.hidden.grad, torch.zeros_like(head.hidden))
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


def test_a_non_finite_head_is_named():
    samples = make_samples(4, 3)
    for s in samples:
        s["loss_masks"] = torch.ones_like(s["loss_masks"])
    batch, _ = make_batch(samples)
    head, _ = make_head(samples)
    with torch.no_grad():
        head.hidden[samples[0]["total_lengths"] + samples[1]["total_lengths"] - 2] = float("nan")
    with pytest.raises(NonFiniteLossError, match=r"sample 101 \(the model's log-probabilities\)"):
        loss_function(make_args(), batch, 1, 3, head)


@pytest.mark.parametrize("placeholder", [False, True])
def test_main_grad_takes_the_gradient_and_autograd_sees_none(placeholder):
    """Two micro-batches add up in the float32 buffer; hooks still run, with zeros where they need a gradient."""
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(12, 5, generator=g).bfloat16(), torch.randn(9, 5, generator=g).bfloat16()
    rows, targets = torch.arange(0, 12, 2), torch.tensor([8, 0, 3, 3, 7, 1])
    twin = weight.float().requires_grad_()
    weight.requires_grad_().main_grad = torch.full((9, 5), 0.5)
    seen = []
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]  # lives as long as someone holds it
    accumulator.register_hook(lambda *_: seen.append(weight.grad))
    for _ in range(2):
        options = {"chunk_size": 4, "parallel": ALONE, "gradient_placeholder": placeholder}
        vocab_parallel_log_probs(hidden, rows, targets, weight=weight, **options)[0].sum().backward()
        (hidden[rows].float() @ twin.t()).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    assert len(seen) == 2 and all((x is not None) == placeholder for x in seen)
    assert not placeholder or not seen[0].any()
    torch.testing.assert_close(weight.main_grad - 0.5, twin.grad, rtol=2e-2, atol=2e-2)


def test_a_frozen_head_passes_the_gradient_on():
    hidden, weight = torch.randn(6, 5, requires_grad=True), torch.randn(9, 5)
    rows = torch.arange(6)
    vocab_parallel_log_probs(hidden, rows, rows, weight=weight, parallel=ALONE)[0].sum().backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def test_bfloat16_is_as_exact_as_whole_bfloat16_logits():
    """Logits are rounded once, as the output layer rounds them; everything behind is float32."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 64, generator=g).bfloat16().requires_grad_() for n in (50, 700))
    rows, targets = torch.arange(50), torch.randint(700, (50,), generator=g)
    log_probs, entropy = vocab_parallel_log_probs(
        hidden, rows, targets, weight=weight, with_entropy=True, chunk_size=16, parallel=ALONE
    )
    (log_probs.sum() + entropy.sum()).backward()
    mine = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    expected = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (expected[0].sum() + expected[1].sum()).backward()
    torch.testing.assert_close((log_probs, entropy), expected, rtol=1e-5, atol=1e-4)
    for got, wanted in zip(mine, (hidden.grad, weight.grad), strict=True):
        assert got.dtype == torch.bfloat16
        assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < 5e-3


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns, but for those `ignored`."""

    def __init__(self, *ignored):
        super().__init__()
        self.ignored, self.elements = {x.numel() for x in ignored}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.numel() not in self.ignored:
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("tokens", [200, 1500])
def test_no_tensor_is_larger_than_a_chunk_of_logits(tokens):
    """Forward and backward, with entropy and kept sets: chunk x V whatever the number of tokens; whole logits are the
    counter-example that shows what is counted.
    """
    vocab, chunk = 997, 16
    g = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 4, generator=g).requires_grad_() for n in (tokens, vocab))
    weight.main_grad = torch.zeros_like(weight)
    rows, targets = torch.arange(tokens), torch.randint(vocab, (tokens,), generator=g)
    keep = KeptVocabulary(rows.repeat_interleave(3), torch.randint(vocab, (3 * tokens,), generator=g), rows % 7 == 0)
    with Largest() as largest:
        log_probs, entropy = vocab_parallel_log_probs(
            hidden, rows, targets, weight=weight, with_entropy=True, chunk_size=chunk, keep=keep, parallel=ALONE
        )
        (log_probs.sum() + entropy.sum()).backward()
    assert chunk * vocab * 0.8 < largest.elements <= max(chunk * vocab, 4 * tokens * 2)
    with Largest() as largest:
        (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    assert largest.elements == tokens * vocab
