"""The rows of logits that exist at once: every row once, never more than allowed, bounded in bytes by default."""

from hypothesis import given
from hypothesis import strategies as st

from slime.utils.log_prob_chunks import row_chunks, rows_per_chunk


@given(count=st.integers(0, 5000), most=st.integers(1, 3000))
def test_every_row_is_in_one_chunk(count, most):
    chunks = list(row_chunks(count, most))
    assert [row for part in chunks for row in range(part.start, part.stop)] == list(range(count))
    assert all(0 < part.stop - part.start <= most for part in chunks)
    assert len(chunks) == -(-count // most)


@given(columns=st.integers(1, 300_000), width=st.sampled_from([2, 4]))
def test_the_automatic_chunk_is_bounded(columns, width):
    rows = rows_per_chunk(-1, columns, width)
    assert rows % 128 == 0 and 128 <= rows <= 8192
    assert rows == 128 or rows * columns * width <= 2**30
    assert rows_per_chunk(77, columns, width) == 77
