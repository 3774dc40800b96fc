"""Log-probabilities on a GPU: the Triton kernels against float64, alone and behind a head; memory and time bounds."""

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import ParallelState
from slime.backends.megatron_utils.loss import softmax
from slime.backends.megatron_utils.loss.vocab_parallel import KeptVocabulary, vocab_parallel_log_probs
from tests.unit.loss.softmax_checks import check_gradient, check_statistics

pytestmark = pytest.mark.gpu
ALONE = ParallelState()
# Logits around 8 are 0.03 apart in bfloat16: so much are their probabilities off.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_equal_float64(dtype):
    """Ragged widths around the block size, padding columns, kept sets, a shard without columns."""
    assert softmax._kernels(torch.zeros(1, device="cuda", dtype=dtype)) is not None
    for rows, width, valid in ((5, 70, 70), (3, 4096, 4000), (7, 9001, 8999), (4, 33, 0), (2, 154_880, 151_552)):
        for keep in (False, True):
            check_statistics(rows, width, valid, keep, dtype, "cuda")
            check_gradient(rows, width, valid, keep, dtype, "cuda")


def problem(rows, hidden, vocab, dtype, padding=0):
    generator = torch.Generator("cuda").manual_seed(rows)
    h = torch.randn(rows + 5, hidden, generator=generator, device="cuda").to(dtype)
    weight = (torch.randn(vocab + padding, hidden, generator=generator, device="cuda") / hidden**0.5 * 2).to(dtype)
    at = torch.randperm(rows + 5, generator=generator, device="cuda")[:rows]
    targets = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    slopes = torch.randn(2, rows, generator=generator, device="cuda")
    return h.requires_grad_(), weight.requires_grad_(), at, targets, slopes


def naive(h, weight, at, targets, slopes, vocab, temperature):
    """Float64 log_softmax of whole logits: values, entropies and gradients."""
    h, weight = (x.detach().double().requires_grad_() for x in (h, weight))
    log_p = ((h[at] @ weight.t())[:, :vocab] / temperature).log_softmax(-1)
    log_probs, entropy = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (log_probs @ slopes[0].double() + entropy @ slopes[1].double()).backward()
    return log_probs.detach(), entropy.detach(), h.grad, weight.grad


def distance(got, wanted):
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("main_grad", [False, True])
def test_head_and_kernels_equal_float64(dtype, main_grad):
    """Values and both gradients over several chunks of unequal size; with main_grad the weight's is added there."""
    vocab, temperature = 5003, 0.8
    h, weight, *rest = problem(300, 192, vocab, dtype, padding=117)
    if main_grad:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    log_probs, entropy = vocab_parallel_log_probs(
        h,
        *rest[:2],
        weight=weight,
        vocab_size=vocab,
        temperature=temperature,
        with_entropy=True,
        chunk_size=128,
        parallel=ALONE,
    )
    (log_probs @ rest[2][0] + entropy @ rest[2][1]).backward()
    assert log_probs.dtype == torch.float32
    if main_grad:
        assert weight.grad is None
    weight_grad = weight.main_grad - 1 if main_grad else weight.grad
    wanted = naive(h, weight, *rest, vocab, temperature)
    for got, expected in zip((log_probs, entropy, h.grad, weight_grad), wanted, strict=True):
        assert distance(got.detach(), expected) < BOUNDS[dtype]
    assert not weight_grad[vocab:].any(), "padding gets no gradient"


def test_kept_vocabulary_on_gpu_equals_cpu():
    vocab = 700
    h, weight, at, targets, slopes = problem(40, 64, vocab, torch.float32)
    kept_rows = torch.arange(40, device="cuda").repeat_interleave(9)
    kept = KeptVocabulary(kept_rows, torch.randint(0, vocab, (360,), device="cuda"), torch.arange(40).cuda() % 5 == 0)
    results = []
    for device in ("cuda", "cpu"):
        x, w, a, t, s = (v.detach().to(device) for v in (h, weight, at, targets, slopes))
        x.requires_grad_(), w.requires_grad_()
        keep = KeptVocabulary(*(v.to(device) for v in (kept.rows, kept.columns, kept.whole)))
        out = vocab_parallel_log_probs(x, a, t, weight=w, with_entropy=True, chunk_size=16, keep=keep, parallel=ALONE)
        (out[0] @ s[0] + out[1] @ s[1]).backward()
        results.append([v.detach().cpu() for v in (*out, x.grad, w.grad)])
    for mine, other in zip(*results, strict=True):
        assert distance(mine, other.double()) < 1e-4


def test_memory_does_not_grow_with_the_tokens():
    """Beside hidden states and their gradient, one chunk of logits; whole logits of the longer row would be 2 GiB."""
    vocab, hidden, chunk = 65_536, 256, 512
    peaks = []
    for rows in (4096, 16_384):
        h, weight, at, targets, _ = problem(rows, hidden, vocab, torch.bfloat16)
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = vocab_parallel_log_probs(
            h, at, targets, weight=weight, with_entropy=True, chunk_size=chunk, parallel=ALONE
        )
        out[0].sum().backward()
        activations = 4 * rows * (2 * hidden + 64)
        peaks.append(torch.cuda.max_memory_allocated() - before - activations)
    assert max(peaks) < 1.25 * 2 * chunk * vocab, peaks
