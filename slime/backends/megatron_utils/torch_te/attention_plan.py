"""Where the queries and keys of a packed row lie: pure index arithmetic over cu_seqlens, no attention, no megatron.

Context parallelism (CP) cuts the queries of every sequence; the keys are gathered from all ranks, rank after rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Sequences up to this length are gathered and padded to the longest of their group, which must not exceed them by more
# than the share or the tokens: for short ones a kernel launch costs more. Longer ones stay alone, where they lie.
SHORT = 64
PADDING_SHARE = 0.8
PADDING_TOKENS = 16


@dataclass(frozen=True)
class Segment:
    """`length` consecutive local queries from `start`; they see the keys key_start .. key_end - 1.

    Keys are numbered in sequence order over the whole (global) pack. The causal mask is aligned to the bottom right.
    """

    start: int
    length: int
    key_start: int
    key_end: int

    @property
    def key_length(self) -> int:
        """Number of keys that the last query of the segment sees."""
        return self.key_end - self.key_start


@dataclass(frozen=True)
class Group:
    """Segments that are computed together. query_rows: [N, L] int64 local rows; key_rows: [N, M] int64 gathered rows.

    Shorter segments repeat their last row at the end, which a causal mask with L == M hides from real queries; real:
    [N, L] bool is False on the repeated ones.
    """

    query_rows: torch.Tensor
    key_rows: torch.Tensor
    real: torch.Tensor

    def to(self, device: torch.device) -> "Group":
        """The same indices on another device."""
        return Group(self.query_rows.to(device), self.key_rows.to(device), self.real.to(device))


def segments_of(cu_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> list[Segment]:
    """The local query segments in local order; cu_seqlens are those of the whole sequences.

    cp_size 1: one segment a sequence. Else zigzag: a sequence is cut in 2 * cp_size chunks and rank r holds chunks r
    and 2 * cp_size - 1 - r, so that all ranks do equal causal work. ValueError when a length is not divisible.
    """
    out: list[Segment] = []
    position = 0
    chunks = (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)
    parts = 1 if cp_size == 1 else 2 * cp_size
    for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        if (end - start) % parts:
            raise ValueError(
                f"a packed sequence of {end - start} tokens cannot be cut in 2 * cp {cp_size} = {parts} equal chunks; "
                f"pad it to {-(-(end - start) // parts) * parts}"
            )
        length = (end - start) // parts
        for chunk in chunks if length else ():
            out.append(Segment(position, length, start, start + (chunk + 1) * length))
            position += length
    return out


def zigzag_rows(cu_seqlens: Sequence[int], cp_size: int) -> torch.Tensor:
    """[T] int64: row of the rank-major gather of zigzag slices that holds token t of the pack in sequence order."""
    local_tokens = cu_seqlens[-1] // cp_size
    parts = [torch.empty(0, dtype=torch.int64)]
    for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        length, base = (end - start) // (2 * cp_size), start // cp_size
        for chunk in range(2 * cp_size):
            rank = min(chunk, 2 * cp_size - 1 - chunk)
            first = rank * local_tokens + base + (length if chunk >= cp_size else 0)
            parts.append(torch.arange(first, first + length))
    return torch.cat(parts)


def groups_of(segments: Sequence[Segment], key_rows: torch.Tensor | None, causal: bool) -> list[Group]:
    """Segments batched by shape. key_rows: see zigzag_rows, None for keys that lie in sequence order.

    Segments with as many keys as queries under a causal mask are padded to a near length; others must be equal.
    """
    ordered = sorted(segments, key=lambda s: (s.length, s.key_length), reverse=True)
    batches: list[list[Segment]] = []
    for segment in ordered:
        if batches and _fits(batches[-1][0], segment, causal):
            batches[-1].append(segment)
        else:
            batches.append([segment])
    return [_group(batch, key_rows) for batch in batches]


def _fits(longest: Segment, segment: Segment, causal: bool) -> bool:
    if longest.length > SHORT:
        return False
    if (longest.length, longest.key_length) == (segment.length, segment.key_length):
        return True
    if not causal or longest.length != longest.key_length or segment.length != segment.key_length:
        return False
    return segment.length >= min(PADDING_SHARE * longest.length, longest.length - PADDING_TOKENS)


def _group(batch: Sequence[Segment], key_rows: torch.Tensor | None) -> Group:
    lengths = torch.tensor([s.length for s in batch])[:, None]
    key_lengths = torch.tensor([s.key_length for s in batch])[:, None]
    queries = torch.tensor([s.start for s in batch])[:, None] + _ramp(lengths)
    keys = torch.tensor([s.key_start for s in batch])[:, None] + _ramp(key_lengths)
    real = torch.arange(queries.size(1))[None] < lengths
    return Group(queries, keys if key_rows is None else key_rows[keys], real)


def _ramp(lengths: torch.Tensor) -> torch.Tensor:
    """lengths: [N, 1] -> [N, max] counting 0, 1, .. and staying at length - 1."""
    return torch.minimum(torch.arange(int(lengths.max()))[None], lengths - 1)
