"""The engine map says what the run does: the same slots, the same nodes, and SGLang's own ranks inside an engine."""

import random

import pytest
import yaml

from slime.plan.engines import EngineParallel, engine_map, engine_parallel, gpu_slots
from slime.utils.arguments.checks.engine_shape import SPANNING_BACKENDS
from slime.utils.layout import LayoutError
from slime.utils.sglang_config import ServerGroup
from tests.helpers.ray_args import make_args
from tests.helpers.upstream_source import functions_of, source_of

SGLANG = {
    "sglang_pp_size": 1,
    "sglang_dp_size": 1,
    "sglang_ep_size": 1,
    "sglang_moe_dp_size": 1,
    "sglang_attn_cp_size": 1,
    "sglang_enable_dp_attention": False,
    "sglang_moe_a2a_backend": "none",
}


def args_of(**changes):
    """32 GPUs on nodes of 8; two training nodes unless said otherwise."""
    cluster = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "num_gpus_per_node": 8, "rollout_num_gpus": 16}
    return make_args(**{"accelerator": "cuda", **SGLANG, **cluster, **changes})


def places(a):
    """(rank, node_rank, nnodes, slot in the rollout placement, gpu) of each node of each engine."""
    found = engine_map(a)
    return [
        (engine.rank, node.node_rank, len(engine.nodes), node.slots.start - found.first_slot, node.gpus.start)
        for engine in found.engines
        for node in engine.nodes
    ]


@pytest.mark.parametrize("mode", [{}, {"colocate": True}, {"debug_train_only": True}, {"debug_rollout_only": True}])
def test_slots_are_those_the_run_reserves(mode):
    from slime.ray.cluster import slots

    for rollout in (0, 8, 24):
        a = args_of(rollout_num_gpus=rollout, **mode)
        trainers, first, total = gpu_slots(a)
        assert (total, first) == slots(a)
        assert len(trainers) == (0 if "debug_rollout_only" in mode else 16)


def test_engines_sit_where_the_run_puts_them():
    """On nodes of equal size, whatever the number of engines and nodes an engine spans."""
    from slime.ray.engine import plan_engines

    rng = random.Random(0)
    for _ in range(60):
        per_node = rng.choice([2, 4, 8])
        each = rng.choice([1, 2, per_node, 2 * per_node, 3 * per_node])
        actor_nodes, colocate = rng.randint(1, 3), rng.random() < 0.5
        a = args_of(
            num_gpus_per_node=per_node,
            actor_num_nodes=actor_nodes,
            actor_num_gpus_per_node=per_node,
            rollout_num_gpus_per_engine=each,
            rollout_num_gpus=each * rng.randint(1, 4),
            colocate=colocate,
        )
        _, first, _ = gpu_slots(a)
        slots = range(first, first + a.rollout_num_gpus)
        planned = plan_engines(a, [s % per_node for s in slots], [f"node{s // per_node}" for s in slots])
        assert places(a) == [(s.rank, s.node_rank, s.nnodes, s.slot, s.gpu_id) for s in planned]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rollout_num_gpus_per_engine": 5}, "16 GPUs make no whole engines of 5; try: .*-per-engine 4"),
        ({"rollout_num_gpus": 24, "rollout_num_gpus_per_engine": 12}, "12 GPUs do not fill whole nodes of 8"),
        (
            {"actor_num_nodes": 1, "actor_num_gpus_per_node": 4, "rollout_num_gpus_per_engine": 8},
            "GPUs 4 to 11 .* 0 and 1",
        ),
        ({"rollout_num_gpus": 18, "rollout_num_gpus_per_engine": 6}, "GPUs 22 to 27 .* nodes 2 and 3 of 8"),
        ({"num_gpus_per_node": 0}, "--num-gpus-per-node: is 0, must be >= 1"),
        ({"rollout_num_gpus_per_engine": 0}, "16 GPUs, 0 of them an engine"),
    ],
)
def test_engines_that_do_not_line_up_are_refused_before_anything_starts(changes, message):
    with pytest.raises(LayoutError, match=message) as caught:
        engine_map(args_of(**changes))
    flag, _, value = caught.value.try_.partition(" ")
    assert engine_map(args_of(**{**changes, flag[2:].replace("-", "_"): int(value)})).engines


def test_on_a_cpu_slots_are_no_devices():
    a = args_of(accelerator="cpu", actor_num_gpus_per_node=1, actor_num_nodes=1, rollout_num_gpus_per_engine=8)
    assert len(engine_map(a).engines) == 2


@pytest.mark.parametrize(
    "changes, shared",
    [
        ({}, [False, False]),
        ({"colocate": True}, [True, True]),
        ({"colocate": True, "actor_num_nodes": 1}, [True, False]),
        ({"colocate": True, "actor_num_nodes": 1, "actor_num_gpus_per_node": 4}, [True, False]),
        ({"debug_rollout_only": True}, [False, False]),
    ],
)
def test_engines_that_share_gpus_with_trainers(changes, shared):
    """Colocated engines beyond the trainers' GPUs keep their memory."""
    found = engine_map(args_of(rollout_num_gpus_per_engine=8, **changes))
    assert [engine.shares_trainer_gpus for engine in found.engines] == shared
    assert found.colocated == any(shared)


def test_prefill_and_decode_meet_at_one_router():
    found = engine_map(args_of(rollout_num_gpus_per_engine=4, prefill_num_servers=1, colocate=True))
    assert [engine.worker_type for engine in found.engines] == ["prefill", "decode", "decode", "decode"]
    (router,) = found.routers
    assert router.disaggregated and router.workers == {"prefill": (0,), "decode": (1, 2, 3)}
    assert found.num_nodes == 2 and [engine.rank for engine in found.engines_on(15)] == [3]


def test_groups_of_a_file_line_up_and_placeholders_keep_their_place(tmp_path):
    groups = [
        {"worker_type": "encoder", "num_gpus": 1, "num_gpus_per_engine": 1},
        {"worker_type": "placeholder", "num_gpus": 7},
        {"worker_type": "regular", "num_gpus": 8, "overrides": {"dp_size": 2, "enable_dp_attention": True}},
        {"worker_type": "regular", "num_gpus": 16, "num_gpus_per_engine": 16, "overrides": {"pp_size": 2}},
    ]
    path = tmp_path / "engines.yaml"
    path.write_text(yaml.safe_dump({"sglang": [{"name": "actor", "server_groups": groups}]}))
    a = args_of(rollout_num_gpus=32, rollout_num_gpus_per_engine=4, sglang_config=str(path))
    found = engine_map(a)
    assert [(engine.rank, engine.slots) for engine in found.engines] == [
        (0, range(16, 17)),
        (2, range(24, 28)),
        (3, range(28, 32)),
        (4, range(32, 48)),
    ]
    assert found.kept_free == (range(17, 24),) and found.engines_on(20) == ()
    assert [(node.node, node.gpus) for node in found.engines[3].nodes] == [(4, range(8)), (5, range(8))]
    assert found.routers[0].workers == {"regular": (2, 3, 4)} and not found.routers[0].disaggregated
    assert [engine.parallel for engine in found.engines[1:]] == [
        EngineParallel(tp=4, dp=2),
        EngineParallel(tp=4, dp=2),
        EngineParallel(tp=8, pp=2),
    ]


def test_engines_that_run_elsewhere_take_no_gpu():
    found = engine_map(args_of(rollout_external_engine_addrs=["10.0.0.1:30000"]))
    assert found.external == ("10.0.0.1:30000",) and found.engines == () and found.total_slots == 16


def test_no_engines_no_routers():
    found = engine_map(args_of(debug_train_only=True))
    assert found.engines == () and found.routers == () and not found.colocated


def sizes():
    """Legal sizes of engines of up to 32 GPUs on nodes of 8."""
    for gpus in (1, 4, 8, 16, 32):
        for pp in (1, 2, 4):
            for dp in (1, 2, 4):
                for ep in (1, 2, 4):
                    tp = gpus // pp
                    if gpus % pp == 0 and tp % (2 * dp) == 0 and tp % (2 * ep) == 0:
                        yield gpus, EngineParallel(tp, pp, dp, cp=2, ep=ep, moe_dp=2)


def test_ranks_inside_an_engine_are_sglangs():
    """Pipeline, attention and expert ranks of every GPU, and the device each process takes on its node."""
    from types import SimpleNamespace

    sglang = functions_of(
        "sglang",
        "srt/entrypoints/engine.py",
        ["_calculate_rank_ranges", "_compute_parallelism_ranks"],
    )
    attention = functions_of("sglang", "srt/layers/dp_attention.py", ["compute_dp_attention_world_info"])
    compared = 0
    for gpus, p in sizes():
        a = args_of(
            rollout_num_gpus=gpus,
            rollout_num_gpus_per_engine=gpus,
            sglang_enable_dp_attention=True,
            **{
                f"sglang_{name}": value
                for name, value in {"pp_size": p.pp, "dp_size": p.dp, "attn_cp_size": p.cp}.items()
            },
            sglang_ep_size=p.ep,
            sglang_moe_dp_size=p.moe_dp,
        )
        (engine,) = engine_map(a).engines
        assert engine.parallel == p and engine.num_gpus == gpus
        server = SimpleNamespace(
            tp_size=p.tp, dp_size=p.dp, attn_cp_size=p.cp, ep_size=p.ep, moe_dp_size=p.moe_dp, enable_dp_attention=True
        )
        expected = {}
        for node in engine.nodes:
            stages, tps, stages_here, tps_here = sglang._calculate_rank_ranges(
                len(engine.nodes), p.pp, p.tp, node.node_rank
            )
            for pp in stages:
                for tp in tps:
                    slot = node.slots.start + (pp % stages_here) * tps_here + tp % tps_here
                    _, moe_dp, ep = sglang._compute_parallelism_ranks(server, tp)
                    attention_tp, _, attention_dp, _ = attention.compute_dp_attention_world_info(
                        True, tp, p.tp, p.dp, p.cp
                    )
                    expected[slot] = (pp, tp, attention_dp, attention_tp, moe_dp, ep)
        mine = {r.slot: (r.pp, r.tp, r.attention_dp, r.attention_tp, r.moe_dp, r.ep) for r in engine.gpu_ranks()}
        assert mine == expected and list(mine) == list(engine.slots)
        compared += 1
    assert compared > 30


def test_some_ways_of_exchanging_tokens_spread_experts_over_all_ranks():
    a = args_of(sglang_moe_a2a_backend="deepep", sglang_ep_size=2)
    assert engine_parallel(a, ServerGroup("regular", 16, 8)).ep == 8
    assert engine_parallel(a, ServerGroup("regular", 16, 8, {"moe_a2a_backend": "none"})).ep == 2
    text = source_of("sglang", "srt/arg_groups/overrides.py")
    listed = text.split("_A2A_EP_SPANNING_BACKENDS = frozenset(", 1)[1].split("}", 1)[0]
    assert {word.strip(' "\n') for word in listed.strip(" {\n").split(",")} - {""} == set(SPANNING_BACKENDS)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sglang_pp_size": 3}, "pp-size 3 does not divide the 8 GPUs of an engine"),
        ({"sglang_pp_size": 0}, "pp-size 0 does not divide"),
        (
            {"sglang_dp_size": 3, "sglang_enable_dp_attention": True},
            "dp-size 3 x attn-cp-size 1 = 3 does not divide the 8 tensor-parallel ranks",
        ),
        ({"sglang_ep_size": 8, "sglang_moe_dp_size": 2}, "moe-dp-size 2 x ep-size 8 = 16 does not divide the 8"),
    ],
)
def test_sizes_that_do_not_tile_an_engine_are_refused(changes, message):
    with pytest.raises(LayoutError, match=message):
        engine_parallel(args_of(**changes), ServerGroup("regular", 16, 8))
