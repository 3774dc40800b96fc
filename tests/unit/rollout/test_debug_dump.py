"""Dumps hold plain values only, come back as they were, and can be cut to a part."""

import numpy as np
import pytest
import torch

from slime.rollout.debug_dump import load_debug_rollout_data, save_debug_rollout_data
from slime.utils.types import Sample
from tests.helpers.rollout_args import rollout_args


def test_round_trip_of_nested_samples(tmp_path):
    args = rollout_args(
        save_debug_rollout_data=f"{tmp_path}/dump/{{rollout_id}}.pt",
        load_debug_rollout_data=f"{tmp_path}/dump/{{rollout_id}}.pt",
    )
    samples = [Sample(index=i, tokens=[1, 2, 3], metadata={"n": np.int64(4), "a": np.arange(3)}) for i in range(5)]
    samples[2].rollout_id = samples[3].rollout_id = 5
    samples[1].status = Sample.Status.TRUNCATED
    samples[2].rollout_routed_experts = torch.arange(8).reshape(2, 2, 2)
    samples[3].trace = {"events": [("x", 1.5)]}
    path = save_debug_rollout_data(args, [samples[:2], [samples[2:4], samples[4]]], 7, evaluation=False)
    assert path == tmp_path / "dump/7.pt"
    loaded = load_debug_rollout_data(args, 7)
    assert [s.index for s in loaded] == [0, 1, 2, 3, 4] and loaded[1].status is Sample.Status.TRUNCATED
    assert torch.equal(loaded[2].rollout_routed_experts, samples[2].rollout_routed_experts)
    assert loaded[3].trace == {"events": [("x", 1.5)]}
    assert loaded[0].metadata["n"] == 4 and loaded[0].metadata["a"].tolist() == [0, 1, 2]
    with pytest.raises(FileNotFoundError, match="8.pt does not exist"):
        load_debug_rollout_data(args, 8)


@pytest.mark.parametrize(("fraction", "kept"), [(0.5, [0, 1, 7, 8, 9]), (0.4, [0, 1, 8, 9]), (1.0, list(range(10)))])
def test_subsample_keeps_both_ends(tmp_path, fraction, kept):
    template = f"{tmp_path}/{{rollout_id}}.pt"
    args = rollout_args(
        save_debug_rollout_data=template, load_debug_rollout_data=template, load_debug_rollout_data_subsample=fraction
    )
    save_debug_rollout_data(args, [[Sample(index=i) for i in range(10)]], 0, evaluation=False)
    assert [s.index for s in load_debug_rollout_data(args, 0)] == kept
    args.load_debug_rollout_data_subsample = 0.01
    with pytest.raises(ValueError, match=r"0.01 \* 10 samples .* = 0, must be 1 to 10"):
        load_debug_rollout_data(args, 0)


def test_eval_dumps_have_their_own_name(tmp_path):
    args = rollout_args(save_debug_rollout_data=f"{tmp_path}/{{rollout_id}}.pt")
    data = {"a": {"samples": [Sample(index=0)]}, "b": {"samples": [Sample(index=1)]}}
    assert save_debug_rollout_data(args, data, 3, evaluation=True) == tmp_path / "eval_3.pt"
    args.load_debug_rollout_data = f"{tmp_path}/eval_{{rollout_id}}.pt"
    assert [s.index for s in load_debug_rollout_data(args, 3)] == [0, 1]
    assert save_debug_rollout_data(rollout_args(), data, 3, evaluation=True) is None


def test_what_could_not_be_read_again_is_refused_with_its_place(tmp_path):
    args = rollout_args(save_debug_rollout_data=f"{tmp_path}/{{rollout_id}}.pt")
    with pytest.raises(
        TypeError, match=r"data\['samples'\]\[0\]\['metadata'\]\['x'\]: builtins.object cannot be stored"
    ):
        save_debug_rollout_data(args, [Sample(metadata={"x": object()})], 0, evaluation=False)
    assert list(tmp_path.iterdir()) == []
