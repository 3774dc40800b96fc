"""Quantisation by its definition: loops over blocks, a table of all FP8 values. numpy only, slow on purpose."""

import math

import numpy as np


def e4m3_values() -> np.ndarray:
    """The 127 finite non-negative values of float8 e4m3fn by bit pattern 0 to 126: 4 bits of exponent, bias 7, 3 bits
    of mantissa, no infinity."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        scale = 2.0 ** (max(exponent, 1) - 7)
        values.append(scale * ((1 if exponent else 0) + mantissa / 8))
    return np.array(values, dtype=np.float64)


TABLE = e4m3_values()


def to_e4m3(value: float) -> int:
    """Bit pattern of the nearest e4m3 value; between two equally near ones the even pattern; beyond 448 it is 448."""
    size = min(abs(value), 448.0)
    above = int(np.searchsorted(TABLE, size))
    if TABLE[above] == size:
        code = above
    else:
        low, high = size - TABLE[above - 1], TABLE[above] - size
        code = above - 1 if low < high or (low == high and (above - 1) % 2 == 0) else above
    return code | (128 if math.copysign(1, value) < 0 else 0)


def fp8_scale(absmax: np.float32, power_of_two: bool = False) -> np.float32:
    scale = np.float32(max(absmax, np.float32(1e-12)) / np.float32(448))
    if power_of_two:
        power = -150
        while np.float64(2.0) ** power < scale:
            power += 1
        scale = np.float32(2.0**power)
    return scale


def fp8_blocks(weight: np.ndarray, bm: int, bn: int, power_of_two: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """weight [M, N] float32 -> bit patterns [M, N] uint8, scales [ceil(M / bm), ceil(N / bn)] float32."""
    rows, columns = weight.shape
    codes = np.zeros(weight.shape, dtype=np.uint8)
    scales = np.zeros((math.ceil(rows / bm), math.ceil(columns / bn)), dtype=np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = np.s_[i * bm : (i + 1) * bm, j * bn : (j + 1) * bn]
            block = weight[where]
            scales[i, j] = fp8_scale(np.abs(block).max(), power_of_two)
            codes[where] = [[to_e4m3(float(np.float32(v / scales[i, j]))) for v in row] for row in block]
    return codes, scales


def int4_groups(weight: np.ndarray, group: int, round_scale) -> tuple[np.ndarray, np.ndarray]:
    """weight [M, N] float32 -> values 1..15 [M, N], scales [M, N / group]. round_scale: to the stored dtype."""
    rows, columns = weight.shape
    values = np.zeros(weight.shape, dtype=np.int64)
    scales = np.zeros((rows, columns // group), dtype=np.float32)
    for row in range(rows):
        for g in range(columns // group):
            where = np.s_[row, g * group : (g + 1) * group]
            scales[row, g] = round_scale(
                max(np.float32(np.abs(weight[where]).max() / np.float32(7)), np.float32(1e-5))
            )
            values[where] = [8 + min(7, max(-7, round(float(np.float32(v / scales[row, g]))))) for v in weight[where]]
    return values, scales


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """values [M, N] of 0..15 -> [M, ceil(N / 8)] int32 by shifting Python integers."""
    rows, columns = values.shape
    words = np.zeros((rows, math.ceil(columns / 8)), dtype=np.int32)
    for row in range(rows):
        for word in range(words.shape[1]):
            total = sum(int(value) << (4 * bit) for bit, value in enumerate(values[row, 8 * word : 8 * word + 8]))
            words[row, word] = np.array(total, dtype=np.uint32).astype(np.int32)
    return words
