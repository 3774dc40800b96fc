"""Attention of the torch_native backend, for the whole batch at once instead of one request after the other.

SGLang 0.5.17 loops over the requests in Python, and recomputes a prefix to extend it; with hundreds of short requests
that loop is nearly all of a step. Here queries are cut into blocks and keys into blocks, and every pair of blocks that
may interact is one entry of a batched product, with a running softmax over the key blocks (FlashAttention,
arXiv:2205.14135). With `fixed_blocks` all products have the same shape whatever the batch, so that a token's numbers
depend on its own request alone: not on its neighbours, nor on whether it was prefilled, decoded or found in the cache.
"""

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_bmm = torch.bmm  # deterministic mode replaces torch.bmm; blocks have fixed shapes already
_LANES = 32  # elements that torch's vector loop takes at once; a remainder goes through other instructions
_MAX_ELEMENTS = 1 << 24  # of keys and values gathered at a time


def fix_backend(module: types.ModuleType) -> None:
    backend = module.TorchNativeAttnBackend
    init, init_metadata = backend.__init__, backend.init_forward_metadata
    extend_by_request, decode_by_request = backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode

    def __init__(self: Any, model_runner: Any) -> None:
        init(self, model_runner)
        self.fixed_blocks = bool(model_runner.server_args.enable_deterministic_inference)
        self.block_layout = None
        self.chosen = None

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        self.block_layout = None
        init_metadata(self, forward_batch)

    def extend(
        self: Any, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, extend_prefix_lens: Tensor, extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None, *, causal: bool = False, is_cross_attn: bool = False,
        scaling: float | None = None, enable_gqa: bool = False, sliding_window_size: int | None = None,
    ) -> Tensor:  # fmt: skip
        if encoder_lens is not None or is_cross_attn or not causal:
            _refuse_fixed_blocks(self.fixed_blocks)
            return extend_by_request(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        layout = _layout_of(self, seq_lens, extend_seq_lens, extend_prefix_lens)
        tables = req_to_token[req_pool_indices]
        return block_attention(
            query, k_cache, v_cache, tables, layout, scaling, sliding_window_size, output, self.chosen
        )

    def decode(
        self: Any, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor | None = None, *, causal: bool = False,
        is_cross_attn: bool = False, scaling: float | None = None, enable_gqa: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:  # fmt: skip
        if encoder_lens is not None or is_cross_attn:
            _refuse_fixed_blocks(self.fixed_blocks)
            return decode_by_request(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, scaling,
                enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        layout = _layout_of(self, seq_lens, None, None)
        tables = req_to_token[req_pool_indices]
        return block_attention(
            query, k_cache, v_cache, tables, layout, scaling, sliding_window_size, output, self.chosen
        )

    backend.forward_extend = _with_choice(backend.forward_extend)
    backend.forward_decode = _with_choice(backend.forward_decode)
    backend.__init__, backend.init_forward_metadata = __init__, init_forward_metadata
    backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode = extend, decode


def _with_choice(forward: Any) -> Any:
    """The backend's method, which now takes what the indexer of sparse attention chose."""

    def forward_with_choice(self: Any, *args: Any, topk_indices: Tensor | None = None, **kwargs: Any) -> Tensor:
        """topk_indices: [T, K] positions that each query sees, -1 for none; None: all before it."""
        self.chosen = topk_indices
        return forward(self, *args, **kwargs)

    return forward_with_choice


def _refuse_fixed_blocks(fixed_blocks: bool) -> None:
    if fixed_blocks:
        raise NotImplementedError("--enable-deterministic-inference on the CPU covers causal self-attention only")


def batch_layout(backend: Any, forward_batch: Any) -> "BlockLayout":
    """The layout of a batch of self-attention, prefill or decode; one serves all layers of a forward pass."""
    if forward_batch.forward_mode.is_decode():
        return _layout_of(backend, forward_batch.seq_lens, None, None)
    return _layout_of(backend, forward_batch.seq_lens, forward_batch.extend_seq_lens, forward_batch.extend_prefix_lens)


def _layout_of(backend: Any, seq_lens: Tensor, query_lens: Tensor | None, prefix_lens: Tensor | None) -> "BlockLayout":
    """query_lens, prefix_lens: None when each request has one new token (decode)."""
    if backend.block_layout is None or backend.block_layout[0] is not seq_lens:
        if query_lens is None:
            query_lens, prefix_lens = torch.ones_like(seq_lens), seq_lens - 1
        backend.block_layout = (seq_lens, block_layout(query_lens, prefix_lens, backend.fixed_blocks))
    return backend.block_layout[1]


@dataclass(frozen=True)
class BlockLayout:
    """How N query blocks of Q rows cover T query tokens; blocks with more keys come first.

    request: [N] index of each block's request. rows: [N, Q] query token of each row (the last one repeats as padding).
    positions: [N, Q] position of that token in its request. valid: [N, Q] false for padding. key_counts: N ints, keys
    that any row of the block may see. kv_block: keys taken at a time.
    """

    request: Tensor
    rows: Tensor
    positions: Tensor
    valid: Tensor
    key_counts: list[int]
    kv_block: int


def block_layout(query_lens: Tensor, prefix_lens: Tensor, fixed_blocks: bool) -> BlockLayout:
    """query_lens, prefix_lens: [R] new tokens of each request (at least 1), and tokens before them."""
    query_lens, prefix_lens = query_lens.long(), prefix_lens.long()
    longest, most_keys = int(query_lens.max()), int((query_lens + prefix_lens).max())
    if fixed_blocks:
        q_block, kv_block = 16, 32
    else:
        q_block, kv_block = min(32, longest), min(128, -(-most_keys // 16) * 16)
    blocks = -(-query_lens // q_block)
    request = torch.repeat_interleave(blocks)
    first_block = torch.cumsum(blocks, 0) - blocks
    start = (torch.arange(len(request)) - first_block[request]) * q_block
    offsets = start[:, None] + torch.arange(q_block)
    valid = offsets < query_lens[request, None]
    offsets = torch.minimum(offsets, query_lens[request, None] - 1)
    first_row = torch.cumsum(query_lens, 0) - query_lens
    positions = prefix_lens[request, None] + offsets
    key_counts, order = torch.sort(positions[:, -1] + 1, descending=True, stable=True)
    rows = first_row[request, None] + offsets
    return BlockLayout(request[order], rows[order], positions[order], valid[order], key_counts.tolist(), kv_block)


def block_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    layout: BlockLayout,
    scaling: float | None,
    window: int | None,
    out: Tensor,
    chosen: Tensor | None = None,
) -> Tensor:
    """Causal attention over paged keys, written to `out` [T, heads, Dv], which is returned.

    query: [T, heads, D]. k_cache, v_cache: [slots, kv_heads, D or Dv]. tables: [R, max_len] slot of each position.
    scaling: of the scores, 1 / sqrt(D) if None. window: a query sees itself and `window` tokens before, None: all.
    chosen: [T, K] the positions that a query sees, -1 for none; at least one of them is not after it. None: all.
    """
    kv_heads, dims = k_cache.shape[1], k_cache.shape[2] + v_cache.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    per_block = kv_heads * layout.kv_block * dims
    if chosen is not None:
        per_block = max(per_block, layout.rows.shape[1] * layout.key_counts[0])
    step = max(1, _MAX_ELEMENTS // per_block)
    for start in range(0, len(layout.key_counts), step):
        part = slice(start, start + step)
        rows, valid = layout.rows[part], layout.valid[part]
        seen = None if chosen is None else _seen(chosen[rows], layout.key_counts[start], layout.kv_block)
        result = _attend(query[rows].float() * scaling, k_cache, v_cache, tables, layout, part, window, seen)
        out[rows[valid]] = result[valid].to(out.dtype)
    return out


def _attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    layout: BlockLayout,
    part: slice,
    window: int | None,
    seen: Tensor | None,
) -> Tensor:
    """query: [N, Q, heads, D] float32, scaled. seen: [N, Q, keys] bool. Returns [N, Q, heads, Dv] float32."""
    blocks, q_block, heads, _ = query.shape
    kv_heads, v_dim, kv_block = k_cache.shape[1], v_cache.shape[2], layout.kv_block
    group = heads // kv_heads
    per_block = (kv_heads, q_block * group)
    query = (
        query.view(blocks, q_block, kv_heads, group, -1).transpose(1, 2).reshape(blocks * kv_heads, per_block[1], -1)
    )
    request, positions, counts = layout.request[part], layout.positions[part], layout.key_counts[part]
    last_key = torch.tensor(counts)[:, None] - 1
    top = sums = acc = None
    active = blocks
    for start in range(0, counts[0], kv_block):
        while counts[active - 1] <= start:  # sorted: blocks without keys from here on are at the end
            active -= 1
        n = active * kv_heads
        keys_at = start + torch.arange(kv_block)
        slots = tables[request[:active, None], torch.minimum(keys_at, last_key[:active])].long()
        keys = k_cache[slots].float().permute(0, 2, 3, 1).reshape(n, -1, kv_block)
        values = v_cache[slots].float().transpose(1, 2).reshape(n, kv_block, v_dim)
        hidden = keys_at > positions[:active, :, None]
        if window is not None and window > -1:
            hidden |= keys_at < positions[:active, :, None] - window
        if seen is not None:
            hidden |= ~seen[:active, :, start : start + kv_block]
        scores = _bmm(query[:n], keys)
        scores.view(active, kv_heads, q_block, group, kv_block).masked_fill_(hidden[:, None, :, None, :], -torch.inf)
        if acc is None:
            # a finite floor: rows whose first keys are all hidden must not compute inf - inf
            top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
            weights = scores.sub_(top).exp_()
            sums, acc = weights.sum(-1, keepdim=True), _bmm(weights, values)
            continue
        new_top = torch.maximum(top[:n], scores.amax(-1, keepdim=True))
        shrink = _exp(top[:n] - new_top)
        weights = scores.sub_(new_top).exp_()
        top[:n] = new_top
        sums[:n] = sums[:n] * shrink + weights.sum(-1, keepdim=True)
        acc[:n] = acc[:n] * shrink + _bmm(weights, values)
    result = (acc / sums).view(blocks, kv_heads, q_block, group, v_dim)
    return result.transpose(1, 2).reshape(blocks, q_block, heads, v_dim)


def _seen(chosen: Tensor, keys: int, kv_block: int) -> Tensor:
    """chosen: [N, Q, K] positions, -1 for none. Returns [N, Q, keys rounded up to whole blocks] bool."""
    columns = -(-keys // kv_block) * kv_block
    seen = torch.zeros(*chosen.shape[:2], columns + 1, dtype=torch.bool)  # the last column takes the -1s
    index = torch.where(chosen < 0, columns, chosen).long()
    return seen.scatter_(2, index, True)[..., :columns]


def _exp(x: Tensor) -> Tensor:
    """exp whose rounding does not depend on where in the tensor an element stands."""
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _LANES)).exp_()[: len(flat)].view(x.shape)
