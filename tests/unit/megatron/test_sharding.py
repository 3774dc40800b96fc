"""Tensor-parallel shards: what is cut can be put together, and each rank gets its part of every block."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.backends.megatron_utils.megatron_to_hf.sharding import merge_shards, partition_dim, split_shards


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 1), st.integers(1, 3))
def test_merging_undoes_splitting(blocks, size, dim, scale):
    shape = [5, 7]
    shape[dim] = sum(blocks) * size * scale
    whole = torch.randn(shape)
    shards = split_shards(whole, dim, size, blocks)
    assert len(shards) == size and len({tuple(shard.shape) for shard in shards}) == 1
    assert torch.equal(merge_shards(shards, dim, blocks), whole)


def test_a_rank_gets_its_share_of_gate_and_of_up():
    """Cut as one matrix, rank 0 would hold the gate alone and rank 1 the up projection."""
    gate, up = torch.arange(4), torch.arange(10, 14)
    first, second = split_shards(torch.cat((gate, up)), 0, 2, (1, 1))
    assert first.tolist() == [0, 1, 10, 11] and second.tolist() == [2, 3, 12, 13]


def test_uneven_blocks_are_refused():
    with pytest.raises(ValueError, match=r"9 rows in blocks of 1:2 cannot be split over 2 ranks"):
        split_shards(torch.zeros(9, 2), 0, 2, (1, 2))


def _param(split: bool, dim: int, mode: str = "") -> torch.Tensor:
    param = torch.zeros(2, 2)
    param.tensor_model_parallel, param.partition_dim, param.parallel_mode = split, dim, mode
    return param


def test_which_dimension_is_split():
    """The second projection of grouped experts says 0 in Transformer Engine and is split along 1; a shared expert's
    says what it is."""
    experts, shared = (
        "decoder.layers.1.mlp.experts.linear_fc2.weight7",
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight",
    )
    assert partition_dim(experts, _param(True, 0)) == 1
    assert partition_dim(shared, _param(True, 0)) == 0
    assert partition_dim(shared, _param(True, 0, "duplicated")) is None
    assert partition_dim(shared, torch.zeros(2)) is None
