"""Tensor-parallel shards of a parameter: cut from the whole, and put together again. Pure functions.

Loading and exporting share them, so that a rank's shard is the same in both directions.
"""

from collections.abc import Sequence

import torch


def partition_dim(name: str, param: torch.Tensor) -> int | None:
    """The dimension of the parameter `name` that its (expert) TP group splits; None when every rank holds it whole.

    param: a parameter of a Megatron module, which carries the attributes that tell.
    """
    if not getattr(param, "tensor_model_parallel", False) or getattr(param, "parallel_mode", "") == "duplicated":
        return None
    # grouped linears of Transformer Engine label their second projection with the wrong dimension
    if is_expert(name) and ".linear_fc2." in name:
        return 1
    return param.partition_dim


def is_expert(name: str) -> bool:
    """Whether `name` is a parameter of routed experts, which have parallel groups of their own."""
    return ".mlp.experts." in name


def split_shards(whole: torch.Tensor, dim: int, size: int, blocks: Sequence[int] = (1,)) -> list[torch.Tensor]:
    """The shards of `size` ranks. blocks: relative sizes of parts of `dim` that are split one by one.

    ValueError when a block does not divide evenly.
    """
    pieces = [part.chunk(size, dim) for part in whole.split(_block_sizes(whole.size(dim), blocks, size), dim)]
    if len(pieces) == 1:
        return list(pieces[0])
    return [torch.cat(shard, dim) for shard in zip(*pieces, strict=True)]


def merge_shards(shards: Sequence[torch.Tensor], dim: int, blocks: Sequence[int] = (1,)) -> torch.Tensor:
    """The inverse of `split_shards`."""
    if len(blocks) == 1:
        return torch.cat(tuple(shards), dim)
    sizes = _block_sizes(shards[0].size(dim), blocks, 1)
    pieces = zip(*(shard.split(sizes, dim) for shard in shards), strict=True)
    return torch.cat([part for block in pieces for part in block], dim)


def _block_sizes(total: int, blocks: Sequence[int], ranks: int) -> list[int]:
    sizes = [total * block // sum(blocks) for block in blocks]
    if sum(sizes) != total or any(size % ranks for size in sizes):
        raise ValueError(f"{total} rows in blocks of {':'.join(map(str, blocks))} cannot be split over {ranks} ranks")
    return sizes
