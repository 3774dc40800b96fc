"""Statistics and gradients of a chunk of logits against float64, for any implementation, device and dtype."""

from types import ModuleType

import torch

from slime.backends.megatron_utils.loss import softmax

NOISE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def chunk(rows, width, valid, keep, dtype, device):
    """(logits, columns, mask or None): large and small logits; some targets held elsewhere; targets always kept."""
    generator = torch.Generator().manual_seed(rows * width + valid)
    logits = (torch.randn(rows, width, generator=generator) * 4 + 30).to(dtype)
    columns = torch.randint(0, max(valid, 1), (rows,), generator=generator)
    columns[::3] = -1
    if valid == 0:
        columns[:] = -1
    mask = None
    if keep:
        mask = torch.rand(rows, width, generator=generator) < 0.3
        mask[torch.arange(rows), columns.clamp(min=0)] |= columns >= 0
        mask[0] = False  # a row whose kept columns are all on other ranks
        mask = mask.to(device)
    return logits.to(device), columns.to(device), mask


def check_statistics(rows, width, valid, keep, dtype, device, kernels: ModuleType | None = None):
    logits, columns, mask = chunk(rows, width, valid, keep, dtype, device)
    accumulate = torch.promote_types(dtype, torch.float32)
    out = torch.full((softmax.STATISTICS, rows + 4), float("nan"), dtype=accumulate, device=device)[:, 2:-2]
    before, scale = logits.clone(), 1 / 0.7
    if kernels:
        kernels.row_statistics(logits, columns, mask, out, valid, scale, True)
    else:
        softmax.row_statistics(logits, columns, mask, out, valid=valid, scale=scale, with_entropy=True)
    assert torch.equal(before, logits)
    for row in range(rows):
        covered = mask[row, :valid] if keep else torch.ones(valid, dtype=torch.bool, device=device)
        x = logits[row, :valid].double()[covered] * scale
        if len(x) == 0:
            assert out[softmax.PEAK, row] <= softmax.NO_LOGIT and out[softmax.TOTAL, row] == 0
            assert out[softmax.INNER, row] == 0
        else:
            weights = (x - x.max()).exp()
            wanted = torch.stack([x.max(), weights.sum(), (weights * (x - x.max())).sum()])
            got = out[[softmax.PEAK, softmax.TOTAL, softmax.INNER], row].double()
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-5)
        target = float(logits[row, columns[row]]) * scale if columns[row] >= 0 else 0.0
        assert abs(float(out[softmax.TARGET, row]) - target) <= 1e-5 * abs(target)


def check_gradient(rows, width, valid, keep, dtype, device, kernels: ModuleType | None = None):
    logits, columns, mask = chunk(rows, width, valid, keep, dtype, device)
    accumulate = torch.promote_types(dtype, torch.float32)
    scale = 1 / 0.7
    x = logits[:, :valid].double() * scale
    covered = x.masked_fill(~mask[:, :valid], float("-inf")) if keep else x
    generator = torch.Generator().manual_seed(rows)
    g, h = torch.randn(2, rows, generator=generator, dtype=torch.float64).to(device)
    numbers = torch.zeros((softmax.GRADIENT_ROWS, rows), dtype=accumulate, device=device)
    for at, values in ((softmax.LOG_P_PEAK, covered), (softmax.H_PEAK, x)):
        # What the other ranks hold takes half of the probability.
        peak = values.amax(-1).clamp(min=0) if valid else values.new_zeros(rows)
        numbers[at], numbers[at + 1] = peak, ((values - peak[:, None]).exp().sum(-1) * 2).clamp(min=1).log()
    numbers[softmax.H_VALUE] = torch.linspace(1, 3, rows)
    numbers[softmax.LOG_P_GRAD], numbers[softmax.H_GRAD] = g, h

    exact = numbers.double()
    p = (covered - exact[softmax.LOG_P_PEAK][:, None] - exact[softmax.LOG_P_LOG_Z][:, None]).exp()
    hit = torch.arange(valid, device=device) == columns[:, None]
    log_q = x - exact[softmax.H_PEAK][:, None] - exact[softmax.H_LOG_Z][:, None]
    wanted = g[:, None] * (hit.double() - p)
    wanted -= h[:, None] * log_q.exp() * (log_q + exact[softmax.H_VALUE][:, None])
    if kernels:
        kernels.gradient_(logits, columns, mask, numbers, valid, scale, True, True)
    else:
        softmax.gradient_(
            logits, columns, mask, numbers, valid=valid, scale=scale, with_log_probs=True, with_entropy=True
        )
    torch.testing.assert_close(logits[:, :valid].double(), wanted * scale, rtol=NOISE[dtype], atol=NOISE[dtype] / 10)
    assert not logits[:, valid:].any()
