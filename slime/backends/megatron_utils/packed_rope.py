"""Rotary embedding of a packed row in one piece.

megatron-core 0.19.2's unfused thd path rotates one sequence after the other: for the hundreds of short sequences of
an RL micro-batch that costs more than the model, and it reads sequence lengths back from the device in every layer.
`install()` puts a vectorised function in its place; it becomes unnecessary when megatron-core's own is vectorised.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Every layer asks twice for the positions of the same micro-batch; they live as long as its cu_seqlens tensor.
_positions: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packed_positions(cu_seqlens: Tensor, cp_rank: int, cp_size: int, restart: bool, tokens: int) -> Tensor:
    """Position in its sequence of every token this context-parallel rank holds, in the rank's order.

    cu_seqlens: [sequences + 1] global cumulative lengths, each length a multiple of 2 * cp_size when cp_size > 1;
    this rank holds of every sequence chunk cp_rank and chunk 2 * cp_size - 1 - cp_rank of 2 * cp_size equal ones
    (zigzag). `tokens` is the number of local tokens. With restart=False positions count from the beginning of the
    row instead. int64 [tokens].
    """
    starts = cu_seqlens[:-1].long()
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    local = lengths // cp_size
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), local, output_size=tokens)
    offset = torch.arange(tokens, device=lengths.device) - (starts // cp_size)[owner]
    position = offset
    if cp_size > 1:
        chunk = (local // 2)[owner]
        front = offset < chunk
        position = torch.where(front, cp_rank * chunk + offset, (2 * cp_size - 2 - cp_rank) * chunk + offset)
    return position if restart else position + starts[owner]


def apply_rotary_pos_emb_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    """Drop-in for megatron-core's `_apply_rotary_pos_emb_thd`: t [tokens, heads, dim], freqs [positions, 1, 1, r].

    As there, freqs as long as the whole row are taken to hold a position for every token of the row; shorter ones are
    counted from the beginning of each sequence.
    """
    if cp_group is None:
        raise ValueError("rotary embedding of a packed row needs the context-parallel group")
    if multi_latent_attention is not None:
        mla_rotary_interleaved = multi_latent_attention
    cp_size, cp_rank = cp_group.size(), cp_group.rank()
    whole_row = freqs.size(0) == t.size(0) * cp_size and len(cu_seqlens) > 2
    known = _positions.setdefault(cu_seqlens, {})
    key = (cp_rank, cp_size, whole_row, t.size(0))
    if key not in known:
        known[key] = packed_positions(cu_seqlens, cp_rank, cp_size, restart=not whole_row, tokens=t.size(0))
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs.index_select(0, known[key]),
        rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved,
        mscale=mscale,
    ).squeeze(1)


def install() -> None:
    """Make megatron-core use the vectorised function for packed rows (only its unfused path asks for it)."""
    rope_utils._apply_rotary_pos_emb_thd = apply_rotary_pos_emb_thd
