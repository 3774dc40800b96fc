"""Cutting a stack of layers into pipeline stages: which cuts are possible and how even they are."""

from collections.abc import Sequence


def equal_middle_splits(
    num_layers: int, stages: int, starts: Sequence[bool] | None = None, multiple_of: int = 1
) -> list[tuple[int, int]]:
    """(layers of the first stage, of the last) such that the stages between hold equally many; most even first.

    starts: per layer, whether a stage may begin with it; None allows all. multiple_of: every stage's layers divide by
    it (the virtual stages of a rank). Evenness is the sum of squared stage sizes. Empty for fewer than two stages.
    """
    found = []
    middle_stages = stages - 2
    if middle_stages < 0:
        return []
    for middle in range(0 if not middle_stages else multiple_of, num_layers, multiple_of):
        ends = num_layers - middle_stages * middle
        for first in range(multiple_of, ends - multiple_of + 1, multiple_of):
            counts = (first, *[middle] * middle_stages, ends - first)
            if (ends - first) % multiple_of == 0 and starts_are_legal(counts, starts):
                found.append((sum(n * n for n in counts), max(counts), (first, ends - first)))
        if not middle_stages:
            break
    return [ends for _, _, ends in sorted(found)]


def balanced_counts(num_layers: int, stages: int, starts: Sequence[bool] | None = None) -> tuple[int, ...] | None:
    """The most even way to cut into `stages` non-empty stages of any sizes; None if there is none.

    starts: as in `equal_middle_splits`. Evenness is the sum of squared stage sizes; among equals the early stages are
    the larger ones. Dynamic program over (stages used, layers placed): O(stages * num_layers^2).
    """
    legal = [starts is None or starts[layer] for layer in range(num_layers)]
    if stages < 1 or not num_layers or not legal[0]:
        return None
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # layers placed -> (cost, stage sizes)
    for stage in range(stages):
        last = stage == stages - 1
        reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin, (cost, counts) in best.items():
            for end in [num_layers] if last else range(begin + 1, num_layers):
                if end <= begin or (not last and not legal[end]):
                    continue
                candidate = (cost + (end - begin) ** 2, (*counts, end - begin))
                if end not in reached or _key(candidate) < _key(reached[end]):
                    reached[end] = candidate
        best = reached
    return best[num_layers][1] if num_layers in best else None


def starts_are_legal(counts: Sequence[int], starts: Sequence[bool] | None) -> bool:
    """Whether every stage that has layers begins with one of `starts`."""
    if starts is None:
        return True
    begin = 0
    for count in counts:
        if count and not starts[begin]:
            return False
        begin += count
    return True


def _key(candidate: tuple[int, tuple[int, ...]]) -> tuple:
    cost, counts = candidate
    return cost, tuple(-count for count in counts)
