"""Splits weighted items into k parts of nearly equal weight: Karmarkar-Karp largest differencing, k-way.

Knows nothing about tokens or ranks; plain Python numbers in, lists of item positions out. Deterministic.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple


class _Subset(NamedTuple):
    """Items that end up in one part. Ordered by (weight, count, smallest item), a total order on disjoint subsets."""

    weight: float
    count: int
    smallest: int
    items: object  # an item position, or a pair of such trees: merging costs O(1)


def balanced_partitions(weights: Sequence[float], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Positions 0..n-1 of `weights` in `num_parts` non-empty parts whose weight sums are close to each other.

    Each part is sorted ascending. With equal_size every part holds n / num_parts items. Differencing: a state is a set
    of at most num_parts subsets; the two states with the largest spread (heaviest minus lightest subset) are merged,
    heaviest subsets with lightest ones, until one state is left (Karmarkar and Karp 1982, k-way form).

    Raises ValueError when a part would stay empty or when equal_size does not divide.
    """
    n = len(weights)
    if num_parts < 1 or n < num_parts:
        raise ValueError(f"cannot split {n} items into {num_parts} non-empty parts")
    if equal_size and n % num_parts:
        raise ValueError(f"cannot split {n} items into {num_parts} equal parts: {n} % {num_parts} = {n % num_parts}")
    if num_parts == 1:
        return [list(range(n))]

    singles = [_Subset(float(w), 1, i, i) for i, w in enumerate(weights)]
    if equal_size:
        singles.sort()
        states = [singles[i : i + num_parts] for i in range(0, n, num_parts)]
    else:
        states = [[single] for single in singles]

    # Heap entries: (-spread, a number unique to the state, the state's subsets in ascending order).
    heap = [(-_spread(state, num_parts), state[0].smallest, state) for state in states]
    heapq.heapify(heap)
    while len(heap) > 1:
        first = heapq.heappop(heap)[2]
        second = heapq.heappop(heap)[2]
        merged = _merge(first, second, num_parts)
        heapq.heappush(heap, (-_spread(merged, num_parts), merged[0].smallest, merged))
    return [sorted(_flatten(subset.items)) for subset in heap[0][2]]


def _spread(state: list[_Subset], num_parts: int) -> float:
    """Heaviest minus lightest subset; a state that lists fewer than num_parts subsets has empty ones of weight 0."""
    lightest = state[0].weight if len(state) == num_parts else 0.0
    return state[-1].weight - lightest


def _merge(a: list[_Subset], b: list[_Subset], num_parts: int) -> list[_Subset]:
    """The i-th lightest subset of one state joins the i-th heaviest of the other; empty subsets are the lightest."""
    if len(a) < len(b):
        a, b = b, a
    joined = max(len(a) + len(b) - num_parts, 0)
    # b's `joined` lightest meet a's `joined` lightest crosswise; all other subsets meet an empty one.
    pairs = [_join(x, y) for x, y in zip(a[:joined], reversed(b[:joined]), strict=True)]
    rest = a[joined:]
    new = pairs + b[joined:]
    if len(new) > 8:
        return sorted(rest + new)
    for subset in new:
        insort(rest, subset)
    return rest


def _join(x: _Subset, y: _Subset) -> _Subset:
    return _Subset(x.weight + y.weight, x.count + y.count, min(x.smallest, y.smallest), (x.items, y.items))


def _flatten(tree: object) -> list[int]:
    """Item positions of a pair tree. Iterative: trees get as deep as there are items."""
    found, todo = [], [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, tuple):
            todo.extend(node)
        else:
            found.append(node)
    return found
