"""Which tokens a query of sparse attention (DSA) attends to: scores of the indexer, and the best of them.

    score(t, j) = sum over heads h of  w[t, h] * relu(q[t, h] . k[j]),   j <= t       (DeepSeek-V3.2, arXiv:2512.02556)

All products have the shapes of the layout's blocks: with fixed blocks a token's choice does not depend on the batch.
"""

from typing import Any

import torch
from torch import Tensor

_bmm = torch.bmm  # deterministic mode replaces torch.bmm; blocks have fixed shapes already
_MAX_ELEMENTS = 1 << 24  # of products at a time


def choose_tokens(query: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, layout: Any, topk: int) -> Tensor:
    """For each query token the positions, in its request, of the `topk` highest scores; -1 where there are fewer.

    query: [T, heads, D], rotated. weights: [T, heads] float32, scaled. keys: [slots, D], rotated. tables: [R, max_len]
    slot of each position. layout: `BlockLayout` of the batch. Returns [T, topk] int32, best first; among equal scores
    the lower position comes first.
    """
    heads, q_block = query.shape[1], layout.rows.shape[1]
    chosen = torch.full((query.shape[0], topk), -1, dtype=torch.int32)
    longest = -(-layout.key_counts[0] // layout.kv_block) * layout.kv_block
    step = max(1, _MAX_ELEMENTS // (q_block * max(heads * layout.kv_block, longest)))
    for start in range(0, len(layout.key_counts), step):
        part = slice(start, start + step)
        rows, valid = layout.rows[part], layout.valid[part]
        best = highest(_scores(query[rows].float(), weights[rows], keys, tables, layout, part), topk)
        chosen[rows[valid], : best.shape[-1]] = best[valid]
    return chosen


def highest(scores: Tensor, topk: int) -> Tensor:
    """Columns of the `topk` highest of each row, in falling order, the lower column first among equals.

    scores: [..., L] float32; -inf is never chosen, -1 stands in its place. Returns [..., min(topk, L)] int32.
    """
    values, columns = torch.sort(scores, dim=-1, descending=True, stable=True)
    return columns[..., :topk].masked_fill(values[..., :topk] == -torch.inf, -1).int()


def _scores(query: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, layout: Any, part: slice) -> Tensor:
    """query: [N, Q, heads, D] float32. weights: [N, Q, heads]. Returns [N, Q, L] float32, -inf for later tokens; L is
    the longest key count of the part, rounded up to whole blocks."""
    blocks, q_block, heads, dim = query.shape
    counts, kv_block = layout.key_counts[part], layout.kv_block
    request, positions = layout.request[part], layout.positions[part]
    last_key = torch.tensor(counts)[:, None] - 1
    query, weights = query.view(blocks, q_block * heads, dim), weights.reshape(blocks * q_block, 1, heads)
    scores = query.new_full((blocks, q_block, -(-counts[0] // kv_block) * kv_block), -torch.inf)
    active = blocks
    for start in range(0, counts[0], kv_block):
        while counts[active - 1] <= start:  # sorted: blocks without keys from here on are at the end
            active -= 1
        keys_at = start + torch.arange(kv_block)
        slots = tables[request[:active, None], torch.minimum(keys_at, last_key[:active])].long()
        products = _bmm(query[:active], keys[slots].float().transpose(1, 2)).relu_()
        summed = _bmm(weights[: active * q_block], products.view(active * q_block, heads, kv_block))
        later = keys_at > positions[:active, :, None]
        scores[:active, :, start : start + kv_block] = summed.view(active, q_block, kv_block).masked_fill_(
            later, -torch.inf
        )
    return scores
