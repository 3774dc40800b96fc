"""The gated delta rule and what surrounds it in plain torch: causal convolution, L2 norm, packed sequences.

The functions take flash-linear-attention's arguments and run on every device; knows nothing of Megatron.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum of squares + eps) over the last dimension, computed in float32, in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Depthwise convolution over the token and the `width - 1` before it in its own sequence, then the activation.

    x: [batch, tokens, channels]. weight: [channels, width], the last column for the token itself. cu_seqlens:
    [sequences + 1] for a row of packed sequences (batch 1). Returns (as x, None); states are not supported.
    """
    _refuse_states(initial_state, output_final_state)
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation {activation!r} of a causal convolution: expected silu or none")
    width, tokens = weight.size(1), x.size(1)
    position = _positions(cu_seqlens, tokens, x.device)
    out = x * weight[:, -1]
    for back in range(1, min(width, tokens)):
        earlier = F.pad(x[:, : tokens - back], (0, 0, back, 0))
        out = out + (earlier * weight[:, width - 1 - back]).masked_fill((position < back)[:, None], 0)
    if bias is not None:
        out = out + bias
    return (out if activation is None else F.silu(out)), None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, None]:
    """o_t = scale S_t^T q_t with S_t = e^g_t S_{t-1} + k_t beta_t (v_t - (e^g_t S_{t-1})^T k_t)^T, S_0 = 0.

    q, k: [batch, tokens, heads, dk]; v: [.., dv]; g (log decay, <= 0), beta: [batch, tokens, heads]. cu_seqlens:
    [sequences + 1] for a row of packed sequences (batch 1), each with a state of its own. scale: dk^-1/2 when not
    given. Returns (o as v, None). Computed in float32, chunk by chunk (Yang et al. 2024, arXiv 2412.06464, section 3):
    a chunk's updates are one triangular system, so that only states go through a loop, one step for all sequences.
    """
    _refuse_states(initial_state, output_final_state)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    batch, tokens, heads, dim = q.shape
    dtype = v.dtype
    plan = _plan(_bounds(cu_seqlens, batch, tokens), chunk_size, q.device)
    # [chunks, heads, chunk, ...] in float32
    q, k, v, g, beta = (
        plan.gather(x.float().flatten(0, 1)).movedim(1, 2) for x in (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1))
    )
    out = _chunks(plan, q * (dim**-0.5 if scale is None else scale), k, v, g.squeeze(-1), beta)
    out = out.movedim(1, 2).flatten(0, 1).index_select(0, plan.place)
    return out.view(batch, tokens, heads, -1).to(dtype), None


def _chunks(plan: "_Plan", q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """All of [chunks, heads, chunk, d] (g without d) -> [chunks, heads, chunk, dv]."""
    size = q.size(2)
    total = g.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    # decay[i, j] = exp(g_{j+1} + .. + g_i) for j <= i: what is left at i of what was written at j
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    grown = total.exp().unsqueeze(-1)
    mixing = (beta * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    right = torch.cat((beta * v, beta * grown * k), dim=-1)
    solved = torch.linalg.solve_triangular(mixing, right, upper=False, unitriangular=True)
    written, forgotten = solved.split((v.size(-1), k.size(-1)), dim=-1)

    within = (q @ k.transpose(-1, -2)) * decay
    read, left = q * grown, k * (total[..., -1:] - total).exp().unsqueeze(-1)
    whole = grown[..., -1:, :]
    outs = []
    state = q.new_zeros(len(plan.steps[0]), q.size(1), k.size(-1), v.size(-1))
    for chunks in plan.steps:
        state = state[: len(chunks)]
        new = written[chunks] - forgotten[chunks] @ state
        outs.append(read[chunks] @ state + within[chunks] @ new)
        state = whole[chunks] * state + left[chunks].transpose(-1, -2) @ new
    return torch.cat(outs)


@dataclass(frozen=True)
class _Plan:
    """How the rows of the flattened batch lie in chunks of equal size.

    rows: [chunks, chunk] int64, -1 behind the end of a sequence. steps: per step of the recurrence the chunks (one a
    sequence, the sequence with most chunks first), numbered as in `rows`. place: [batch * tokens] where each row lies
    in the flattened outputs of all steps.
    """

    rows: Tensor
    steps: tuple[Tensor, ...]
    place: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """x: [rows, ...] -> [chunks, chunk, ...], zeros behind the ends: they neither decay nor write."""
        taken = x.index_select(0, self.rows.clamp(min=0).flatten()).unflatten(0, self.rows.shape)
        return taken.masked_fill((self.rows < 0).view(*self.rows.shape, *(1,) * (x.dim() - 1)), 0)


def _plan(bounds: Sequence[tuple[int, int]], chunk_size: int, device: torch.device) -> _Plan:
    ordered = sorted(bounds, key=lambda bound: bound[0] - bound[1])
    size = min(chunk_size, ordered[0][1] - ordered[0][0])
    rows, steps = [], []
    for step in range(-(-(ordered[0][1] - ordered[0][0]) // size)):
        active = [(start + step * size, end) for start, end in ordered if start + step * size < end]
        starts, ends = torch.tensor(active).unbind(1)
        index = starts[:, None] + torch.arange(size)
        steps.append(torch.arange(len(active), device=device) + sum(map(len, rows)))
        rows.append(index.masked_fill(index >= ends[:, None], -1))
    table = torch.cat(rows)
    real = (table.flatten() >= 0).nonzero().squeeze(1)
    place = torch.empty_like(real)
    place[table.flatten()[real]] = real
    return _Plan(table.to(device), tuple(steps), place.to(device))


def _bounds(cu_seqlens: Tensor | None, batch: int, tokens: int) -> list[tuple[int, int]]:
    """(first row, end) of every sequence of the flattened batch; empty ones are left out."""
    if cu_seqlens is None:
        return [(row * tokens, (row + 1) * tokens) for row in range(batch)]
    ends = cu_seqlens.tolist()
    if batch != 1 or ends[0] != 0 or ends[-1] != tokens:
        raise ValueError(
            f"cu_seqlens from {ends[0]} to {ends[-1]} for {batch} rows of {tokens} tokens: they must tile one row"
        )
    return [(start, end) for start, end in zip(ends, ends[1:], strict=False) if start < end]


def _positions(cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """[tokens] int64: position of every token in its sequence."""
    position = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        return position
    cu_seqlens = cu_seqlens.to(position)
    return position - cu_seqlens[torch.searchsorted(cu_seqlens, position, right=True) - 1]


def _refuse_states(initial_state: None, output_final_state: bool) -> None:
    if initial_state is not None or output_final_state:
        raise ValueError("states that outlive the call need flash-linear-attention; training has none")
