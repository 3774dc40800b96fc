"""Hugging Face tensors grouped into requests: by size, and by what an engine must receive together. Pure functions."""

from collections.abc import Iterable, Iterator, Sequence

import torch

NamedTensor = tuple[str, torch.Tensor]
Bucket = list[NamedTensor]

# SGLang fuses these two, so both must come in one request.
_TOGETHER = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")


def atomic_groups(params: Iterable[NamedTensor], paired: bool = True) -> Iterator[list[NamedTensor]]:
    """Parameters one by one, but those that an engine fuses together. ValueError when one of a pair never comes.

    paired: False for latent attention without compressed queries, where only the second of the two exists.
    """
    if not paired:
        yield from ([param] for param in params)
        return
    waiting: dict[str, list[NamedTensor]] = {}
    for name, param in params:
        suffix = next((suffix for suffix in _TOGETHER if name.endswith(suffix)), None)
        if suffix is None:
            yield [(name, param)]
            continue
        group = waiting.setdefault(name.removesuffix(suffix), [])
        group.append((name, param))
        if len(group) == len(_TOGETHER):
            yield waiting.pop(name.removesuffix(suffix))
    if waiting:
        raise ValueError(f"{next(iter(waiting.values()))[0][0]} has no partner among {', '.join(_TOGETHER)}")


def plan_buckets(items: Iterable[Sequence[NamedTensor]], limit: int) -> Iterator[Bucket]:
    """Greedy, in order: items are joined until the next would exceed `limit` bytes. A larger item is alone."""
    bucket: Bucket = []
    size = 0
    for item in items:
        item_size = sum(tensor.nbytes for _, tensor in item)
        if bucket and size + item_size > limit:
            yield _aligned(bucket)
            bucket, size = [], 0
        bucket.extend(item)
        size += item_size
    if bucket:
        yield _aligned(bucket)


def _aligned(bucket: Bucket) -> Bucket:
    """Wide types first: in the flattened bytes every tensor then starts at a multiple of its element size."""
    return sorted(bucket, key=lambda named: -named[1].element_size())


def flatten(bucket: Bucket) -> torch.Tensor:
    """All bytes of the bucket, one tensor after the other. [bytes] uint8."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket])
