"""Who sits where: the order of slots, the parts of the placement group, and actors pinned to them."""

import random

import pytest
import ray

from slime.ray import placement_group
from slime.ray.actor_group import memory_saver_library, trainer_env
from slime.ray.engine import plan_engines
from slime.ray.placement_group import create_placement_groups, sort_key
from tests.helpers.ray_args import make_args


def test_slots_are_ordered_by_numbers_not_by_text():
    ordered = [("10.0.0.2", 1), ("10.0.0.2", "2"), ("10.0.0.2", "10"), ("10.0.0.10", 0), ("10.0.1.1", "3")]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled, key=lambda slot: sort_key(*slot)) == ordered


def test_unresolvable_node_names_are_still_ordered(monkeypatch):
    def unknown(name):
        raise OSError(name)

    monkeypatch.setattr(placement_group.socket, "gethostbyname", unknown)
    assert sorted(["b-node", "a-node"], key=lambda node: sort_key(node, 0)) == ["a-node", "b-node"]


def test_uuid_devices_come_in_a_stable_order():
    assert sorted(["GPU-b", "GPU-a"], key=lambda gpu: sort_key("10.0.0.1", gpu)) == ["GPU-a", "GPU-b"]


def remove(placements):
    ray.util.remove_placement_group(placements["actor"].pg or placements["rollout"].pg)


@pytest.mark.parametrize(
    "changes, actor, rollout",
    [
        ({}, [0, 1], [2, 3, 4]),
        ({"colocate": True}, [0, 1], [0, 1, 2]),
        ({"debug_train_only": True}, [0, 1], []),
        ({"debug_rollout_only": True}, [], [0, 1, 2]),
    ],
)
def test_placement_of_each_mode(cluster, changes, actor, rollout):
    """Slots of one CPU node, numbered in order."""
    placements = create_placement_groups(make_args(rollout_num_gpus=3, **changes))
    try:
        assert list(placements["actor"].gpu_ids) == actor
        assert list(placements["rollout"].gpu_ids) == rollout
        pg, bundles, gpu_ids = placements["rollout"]
        assert len(bundles) == len(gpu_ids) == len(placements["rollout"])
    finally:
        remove(placements)


def test_actors_share_a_slot_and_no_more(cluster):
    """A trainer (0.4), another (0.4) and an engine (0.2) fill a slot; a fourth actor has to wait."""
    placements = create_placement_groups(make_args(actor_num_gpus_per_node=1, rollout_num_gpus=1, colocate=True))

    @ray.remote
    class Tenant:
        def ping(self):
            return True

    try:
        strategy = placements["actor"].strategy(0)
        options = [{"num_cpus": share, "scheduling_strategy": strategy} for share in (0.4, 0.4, 0.2, 0.2)]
        tenants = [Tenant.options(**option).remote() for option in options]
        refs = [tenant.ping.remote() for tenant in tenants]
        assert ray.get(refs[:3], timeout=60) == [True] * 3
        assert ray.wait([refs[3]], timeout=1.0)[0] == []
    finally:
        remove(placements)


def test_a_cluster_that_is_taken_says_so(cluster):
    first = create_placement_groups(make_args(actor_num_gpus_per_node=4, rollout_num_gpus=3))
    try:
        with pytest.raises(TimeoutError, match="did not hand over 4 CPUs .* it has 8, 1 of them free"):
            create_placement_groups(make_args(ray_startup_timeout=1))
    finally:
        remove(first)


def test_engines_take_consecutive_slots():
    args = make_args(accelerator="cuda", rollout_num_gpus_per_engine=2)
    slots = plan_engines(args, gpu_ids=[4, 5, 6, 7], nodes=["a"] * 4)
    assert [(s.rank, s.node_rank, s.nnodes, s.slot, s.gpu_id) for s in slots] == [(0, 0, 1, 0, 4), (1, 0, 1, 2, 6)]


def test_an_engine_over_two_nodes_counts_its_nodes_from_zero():
    args = make_args(accelerator="cuda", rollout_num_gpus_per_engine=4, num_gpus_per_node=2)
    slots = plan_engines(args, gpu_ids=[0, 1] * 4, nodes=["a", "a", "b", "b", "c", "c", "d", "d"])
    assert [(s.rank, s.node_rank, s.nnodes, s.slot) for s in slots] == [
        (0, 0, 2, 0),
        (0, 1, 2, 2),
        (1, 0, 2, 4),
        (1, 1, 2, 6),
    ]
    assert [s.name for s in slots][:2] == ["engine 0 node 0", "engine 0 node 1"]


@pytest.mark.parametrize(
    "gpu_ids, nodes, message",
    [
        ([0, 1, 2], ["a"] * 3, "2 must divide 3"),
        ([0, 2], ["a"] * 2, "a/0, a/2"),
        ([7, 0], ["a", "b"], "a/7, b/0"),
    ],
)
def test_engines_that_do_not_line_up_are_refused(gpu_ids, nodes, message):
    with pytest.raises(ValueError, match=message):
        plan_engines(make_args(accelerator="cuda", rollout_num_gpus_per_engine=2), gpu_ids, nodes)


def test_no_rollout_gpus_no_engines():
    assert plan_engines(make_args(), [], []) == []


def test_train_env_vars_win_and_are_text():
    env = trainer_env(make_args(train_env_vars={"OMP_NUM_THREADS": 3, "X": "y"}))
    assert env == {"OMP_NUM_THREADS": "3", "X": "y"}


def test_memory_saver_library_prefers_the_newest_cuda(tmp_path):
    package = tmp_path / "torch_memory_saver"
    package.mkdir()
    with pytest.raises(FileNotFoundError, match="--offload-train"):
        memory_saver_library(package)
    for build in ("", "_cu12", "_cu13"):
        library = tmp_path / f"torch_memory_saver_hook_mode_preload{build}.abi3.so"
        library.touch()
        assert memory_saver_library(package) == library
