"""Losses on gloo ranks equal those of one process: vocabulary over TP, samples over DP, tokens over zigzag CP."""

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.cp_utils import (
    ParallelState,
    all_gather_with_cp,
    get_parallel_state,
    slice_log_prob_with_cp,
    slice_with_cp,
)
from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function
from slime.backends.megatron_utils.loss.vocab_parallel import KeptVocabulary, vocab_parallel_log_probs
from tests.helpers.gloo import run_ranks
from tests.unit.loss.reference import VOCAB, install_parallel_state, make_args, make_batch, make_samples

PER_TOKEN = ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "values", "returns")
WORLD = 4


def test_four_ranks_equal_one_process():
    """TP 2, DP 2 x CP 2 and CP 4 of the same four processes; the checks below run on every rank."""
    run_ranks(check_everything, WORLD, timeout=120)


def check_everything(rank, world_size):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tp = ParallelState(tp_rank=rank % 2, tp_size=2, tp_group=pairs[rank // 2])
    check_vocab_parallel(tp)
    check_head(tp)
    layouts = {
        "dp2 cp2": {"cp": (rank % 2, 2, pairs[rank // 2]), "dp_cp": (rank, 4, dist.group.WORLD)},
        "cp4": {"cp": (rank, 4, dist.group.WORLD), "dp_cp": (rank, 4, dist.group.WORLD)},
        "dp4": {"dp_cp": (rank, 4, dist.group.WORLD)},
    }
    objectives = (
        {},
        {"calculate_per_token_loss": True},
        {"advantage_estimator": "gspo", "use_opsm": True, "opsm_delta": 0.01},
        {"advantage_estimator": "cispo", "use_tis": True, "entropy_coef": 0.01, "recompute_loss_function": True},
    )
    for flags in objectives:
        args = make_args(**flags, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
        install_parallel_state(dp_cp=(0, 1, None))
        expected = train_step(args, make_samples(5, 8), dp_rank=0, dp_size=1)
        for layout in layouts.values():
            install_parallel_state(**layout)
            dp_size = WORLD // layout.get("cp", (0, 1))[1]
            check_step(args, expected, rank // (WORLD // dp_size), dp_size)
    for name in ("dp2 cp2", "cp4"):
        check_advantages(layouts[name], rank)
    check_gather(rank)


def check_vocab_parallel(tp):
    """Values and gradients of the vocabulary halves, in chunks, with a temperature and with entropy."""
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0))
    rows, targets = torch.tensor([1, 2, 5, 8, 0]), torch.tensor([0, VOCAB - 1, VOCAB // 2, 3, VOCAB // 2 - 1])
    weights = torch.tensor([0.3, -1.0, 2.0, 0.7, 1.1])

    def run(x, parallel):
        x = x.clone().requires_grad_()
        options = {"temperature": 0.7, "with_entropy": True, "parallel": parallel, "chunk_size": 2}
        log_probs, entropy = vocab_parallel_log_probs(x, rows, targets, **options)
        (log_probs @ weights + entropy @ weights.flip(0)).backward()
        return log_probs.detach(), entropy.detach(), x.grad

    whole = run(logits, ParallelState())
    part = slice(tp.tp_rank * VOCAB // 2, (tp.tp_rank + 1) * VOCAB // 2)
    halves = run(logits[:, part].contiguous(), tp)
    for got, expected in zip(halves, (whole[0], whole[1], whole[2][:, part]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def check_head(tp):
    """Hidden states and halves of a padded head, kept sets included; the ranks' gradients of hidden states add up."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(9, 6, generator=g), torch.randn(VOCAB, 6, generator=g)
    rows, targets = torch.tensor([1, 2, 5, 8, 0]), torch.tensor([0, VOCAB - 4, VOCAB // 2, 3, VOCAB // 2 - 1])
    # Row 0 keeps columns of both halves, 1 only its target, 3 only the first half's; 2 and 4 are whole.
    kept, kept_columns = torch.tensor([0, 0, 3]), torch.tensor([5, VOCAB - 6, 7])
    whole_rows = torch.tensor([False, False, True, False, True])

    def run(w, parallel):
        h, w = hidden.clone().requires_grad_(), w.clone().requires_grad_()
        columns = kept_columns - parallel.tp_rank * len(w)
        owned = (columns >= 0) & (columns < len(w))
        keep = KeptVocabulary(kept[owned], columns[owned], whole_rows)
        options = {"vocab_size": VOCAB - 3, "temperature": 0.7, "with_entropy": True, "chunk_size": 2, "keep": keep}
        log_probs, entropy = vocab_parallel_log_probs(h, rows, targets, weight=w, parallel=parallel, **options)
        (log_probs.sum() + entropy.sum()).backward()
        return log_probs.detach(), entropy.detach(), h.grad, w.grad

    log_probs, entropy, hidden_grad, weight_grad = run(weight, ParallelState())
    part = slice(tp.tp_rank * VOCAB // 2, (tp.tp_rank + 1) * VOCAB // 2)
    results = run(weight[part], tp)
    dist.all_reduce(results[2], group=tp.tp_group)
    for got, expected in zip(results, (log_probs, entropy, hidden_grad, weight_grad[part]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert float(log_probs[1]) == 0


def local_batch(samples):
    """The micro-batch as this context-parallel rank receives it."""
    if get_parallel_state().cp_size == 1:
        return make_batch(samples)
    batch, _ = make_batch(samples)
    for key in PER_TOKEN:
        lengths = zip(batch[key], batch["total_lengths"], batch["response_lengths"], strict=True)
        batch[key] = [slice_log_prob_with_cp(x, n, m) for x, n, m in lengths]
    logits = torch.cat([slice_with_cp(s["logits"], 0.0) for s in samples]).unsqueeze(0)
    return batch, logits.requires_grad_()


def train_step(args, samples, dp_rank, dp_size):
    """One step as Megatron runs it, two micro-batches a rank: ({sample: gradient of its local logits}, metrics)."""
    count = len(samples) // dp_size
    mine = list(range(dp_rank * count, (dp_rank + 1) * count))
    grads, metrics, tokens = {}, 0, torch.zeros((), dtype=torch.int64)
    dp_cp_size = get_parallel_state().dp_cp_size
    for micro in (mine[: count // 2], mine[count // 2 :]):
        batch, logits = local_batch([samples[i] for i in micro])
        loss, normaliser, log = loss_function(args, batch, 2, len(samples), logits)
        loss.backward()
        metrics, tokens = metrics + log["values"], tokens + normaliser
        sizes = [len(slice_with_cp(samples[i]["tokens"], 0)) for i in micro]
        grads |= dict(zip(micro, logits.grad[0].split([*sizes, logits.size(1) - sum(sizes)]), strict=False))
    if dp_cp_size > 1:
        dist.all_reduce(metrics)
        dist.all_reduce(tokens)
    # Per token: gradients are summed, then divided by all tokens. Else: the mean over DP x CP of loss / micro-batches.
    scale = 1 / int(tokens) if args.calculate_per_token_loss else 1 / (2 * dp_cp_size)
    return {i: g * scale for i, g in grads.items()}, metrics


def check_step(args, expected, dp_rank, dp_size):
    expected_grads, expected_metrics = expected
    grads, metrics = train_step(args, make_samples(5, 8), dp_rank, dp_size)
    for i, got in grads.items():
        torch.testing.assert_close(got, slice_with_cp(expected_grads[i], 0.0), rtol=1e-5, atol=1e-7)
    cp_size = get_parallel_state().cp_size
    expected_metrics = expected_metrics * torch.tensor([cp_size] + [1] * (len(metrics) - 1))
    torch.testing.assert_close(metrics, expected_metrics, rtol=1e-5, atol=1e-5)


def rollout(samples):
    data = {key: [s[key] for s in samples] for key in samples[0] if key not in ("advantages", "returns")}
    data["rewards"] = [s["sample_indices"] * 0.1 - 10 for s in samples]
    return data


def check_advantages(layout, rank):
    """CP-gathered estimators and DP x CP whitening equal the slices of what one process computes."""
    cp_size = layout["cp"][1]
    for estimator in ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"):
        args = make_args(advantage_estimator=estimator, kl_coef=0.2, gamma=0.9, lambd=0.8, normalize_advantages=True)
        install_parallel_state(dp_cp=(0, 1, None))
        samples = make_samples(6, 8)
        whole = rollout(samples)
        compute_advantages_and_returns(args, whole)
        install_parallel_state(**layout)
        count = len(samples) * cp_size // WORLD
        mine = slice(rank // cp_size * count, (rank // cp_size + 1) * count)
        local = rollout(samples[mine])
        for key in ("log_probs", "ref_log_probs", "values"):
            lengths = zip(local[key], local["total_lengths"], local["response_lengths"], strict=True)
            local[key] = [slice_log_prob_with_cp(x, n, m) for x, n, m in lengths]
        compute_advantages_and_returns(args, local)
        for key in ("kl", "advantages", "returns"):
            lengths = zip(whole[key][mine], local["total_lengths"], local["response_lengths"], strict=True)
            expected = [slice_log_prob_with_cp(x, n, m) for x, n, m in lengths]
            torch.testing.assert_close(local[key], expected, rtol=1e-5, atol=1e-5)


def check_gather(rank):
    """Slices come back as the whole response on all ranks; the gradient of a slice sums what all ranks did with it."""
    parallel = ParallelState(cp_rank=rank, cp_size=WORLD, cp_group=dist.group.WORLD)
    for n, m in ((5, 2), (40, 33), (9, 8), (17, 1)):
        whole = torch.arange(1.0, m + 1)
        local = slice_log_prob_with_cp(whole, n, m, parallel).clone().requires_grad_()
        gathered = all_gather_with_cp(local, n, m, parallel)
        assert torch.equal(gathered, whole)
        (gathered * (rank + 1)).sum().backward()
        assert (local.grad == 1 + 2 + 3 + 4).all()
