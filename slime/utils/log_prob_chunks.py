"""How many rows of logits are made at once where log-probabilities are computed: one rule for trainer and plan."""

from collections.abc import Iterator

# Enough rows to keep matrix units busy and to spread the cost of adding up the head's gradient once a chunk, but no
# more than this many bytes of logits. A CPU gains nothing beyond its caches.
_ROWS = 8192
_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}
_MULTIPLE = 128  # tiles of a matrix product


def rows_per_chunk(chunk_size: int, columns: int, width: int, device: str = "cuda") -> int:
    """--log-probs-chunk-size, or the automatic size for -1: logits of `columns` numbers of `width` bytes a row."""
    if chunk_size > 0:
        return chunk_size
    fit = _BYTES[device] // (columns * width)
    return min(max(fit // _MULTIPLE, 1) * _MULTIPLE, _ROWS)


def row_chunks(count: int, most: int) -> Iterator[slice]:
    """Slices of 0 .. count, as few as possible of at most `most` rows, nearly equal or multiples of a tile."""
    if count == 0:
        return
    size = -(-count // -(-count // most))
    size = min(-(-size // _MULTIPLE) * _MULTIPLE, most)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
