"""Row statistics of a chunk of logits, and the chunk turned into its gradient: all that a log-softmax needs of them.

In plain torch here, in Triton on CUDA devices (`softmax_kernels`); which one runs is decided here and nowhere else.
"""

from types import ModuleType

import torch
from torch import Tensor

# Below every logit of a model, finite: the maximum of no columns at all.
NO_LOGIT = -1e30

# Rows of the statistics of a row of logits x, over the columns it covers, after scaling.
PEAK, TOTAL, TARGET, INNER = range(4)  # m = max x; sum exp(x - m); x of the target, or 0; sum exp(x - m) (x - m)
STATISTICS = 4
# Rows that a gradient needs: of the softmax behind the log-probability, then of the one behind the entropy H.
# dL / d log p and dL / dH are the gradients that came in.
LOG_P_PEAK, LOG_P_LOG_Z, LOG_P_GRAD, H_PEAK, H_LOG_Z, H_VALUE, H_GRAD = range(7)
GRADIENT_ROWS = 7


def row_statistics(
    logits: Tensor,
    columns: Tensor,
    keep: Tensor | None,
    out: Tensor,
    *,
    valid: int,
    scale: float,
    with_entropy: bool,
) -> None:
    """Write the statistics of every row into out [STATISTICS, R], in out's dtype (float32, or float64 for float64).

    logits: [R, W], unit column stride. columns: [R] int64, the target's column, -1 if other ranks hold it. keep:
    [R, W] bool, the columns to cover; None for all. Columns from `valid` on only pad the vocabulary. scale: 1 /
    temperature. INNER is written only with_entropy. A row that covers no column has PEAK = NO_LOGIT and TOTAL = 0.
    """
    if kernels := _kernels(logits):
        kernels.row_statistics(logits, columns, keep, out, valid, scale, with_entropy)
        return
    x = logits[:, :valid].to(out.dtype)
    x = x.mul_(scale) if x.data_ptr() != logits.data_ptr() else x * scale
    if keep is not None:
        x.masked_fill_(~keep[:, :valid], float("-inf"))
    out[TARGET] = 0
    if valid == 0:
        out[PEAK], out[TOTAL], out[INNER] = NO_LOGIT, 0, 0
        return
    out[TARGET] = torch.where(
        columns >= 0, x.gather(1, columns.clamp(min=0, max=valid - 1).unsqueeze(1)).squeeze(1), 0
    )
    peak = x.amax(-1).clamp(min=NO_LOGIT)
    weights = x.sub_(peak.unsqueeze(1)).exp()
    out[PEAK], out[TOTAL] = peak, weights.sum(-1)
    if with_entropy:
        if keep is not None:
            x.masked_fill_(~keep[:, :valid], 0)
        out[INNER] = torch.einsum("rv,rv->r", weights, x)


def gradient_(
    logits: Tensor,
    columns: Tensor,
    keep: Tensor | None,
    rows: Tensor,
    *,
    valid: int,
    scale: float,
    with_log_probs: bool,
    with_entropy: bool,
) -> None:
    """Overwrite logits [R, W] by the gradient of sum g log p + h H, in their own dtype, computed in rows' dtype.

    With x = scale * logit: d log p / dx = onehot - p over the columns of `keep`, and dH / dx = -p (log p + H) over
    all. rows: [GRADIENT_ROWS, R]. Padding columns (from `valid` on) get 0.
    """
    if kernels := _kernels(logits):
        kernels.gradient_(logits, columns, keep, rows, valid, scale, with_log_probs, with_entropy)
        return
    x = logits[:, :valid].to(rows.dtype) * scale
    result = torch.zeros_like(x)
    if with_log_probs and valid:
        p = (x - rows[LOG_P_PEAK].unsqueeze(1)).sub_(rows[LOG_P_LOG_Z].unsqueeze(1)).exp_()
        if keep is not None:
            p.masked_fill_(~keep[:, :valid], 0)
        g = rows[LOG_P_GRAD].unsqueeze(1)
        torch.mul(p, -g, out=result)
        at = columns.clamp(min=0, max=valid - 1).unsqueeze(1)
        result.scatter_add_(1, at, g * (columns >= 0).unsqueeze(1))
    if with_entropy:
        log_p = x.sub_(rows[H_PEAK].unsqueeze(1)).sub_(rows[H_LOG_Z].unsqueeze(1))
        p = log_p.exp()
        slope = log_p.add_(rows[H_VALUE].unsqueeze(1)).mul_(p)
        result.addcmul_(slope, rows[H_GRAD].unsqueeze(1), value=-1)
    logits[:, :valid] = result.mul_(scale)
    logits[:, valid:] = 0


def _kernels(logits: Tensor) -> ModuleType | None:
    """The Triton kernels where they can run: CUDA, and not the float64 that only tests use."""
    if not logits.is_cuda or logits.dtype == torch.float64:
        return None
    from slime.backends.megatron_utils.loss import softmax_kernels  # Triton is there only with CUDA

    return softmax_kernels
