"""The plan's weight traffic is that of the real bucket planner, and adds up to the model."""

import random
from argparse import Namespace

import pytest
import torch

from slime.backends.megatron_utils.update_weight.buckets import plan_buckets
from slime.plan.parameters import model_parameters
from slime.plan.weight_sync import count_buckets, plan_weight_sync, stage_tensor_bytes, transport_of
from slime.utils.arguments.reading import read_args
from slime.utils.layout import pipeline_layout
from slime.utils.model_shape import ModelShape

# Unequal sizes; two dense and four MoE layers over two pipeline stages, vocabulary not a multiple of 128.
MOE = (
    "--num-layers 6 --hidden-size 48 --ffn-hidden-size 112 --num-attention-heads 6 --group-query-attention "
    "--num-query-groups 2 --kv-channels 16 --swiglu --disable-bias-linear --normalization RMSNorm --vocab-size 301 "
    "--position-embedding-type rope --use-rotary-position-embeddings "
    "--num-experts 4 --moe-layer-freq [0]*2+[1]*4 --moe-ffn-hidden-size 40 --moe-router-topk 2 "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --pipeline-model-parallel-size 2 "
    "--actor-num-gpus-per-node 4 --rollout-batch-size 4 --global-batch-size 4"
).split()


def arguments(*more: str) -> Namespace:
    return read_args([*MOE, *more], environ={}, dry_run=True).args


def test_bucket_counts_equal_the_real_planner():
    """Same greedy rule, larger-than-limit tensors alone included, over random sizes."""
    rng = random.Random(5)
    for _ in range(200):
        sizes = [rng.randint(1, rng.choice((3, 40, 130))) for _ in range(rng.randint(0, 30))]
        limit = rng.randint(1, 100)
        items = [[("w", torch.empty(size, dtype=torch.uint8, device="meta"))] for size in sizes]
        assert count_buckets(sizes, limit) == len(list(plan_buckets(items, limit)))


@pytest.mark.parametrize("more", [(), ("--untie-embeddings-and-output-weights",), ("--fp32", "--mtp-num-layers", "1")])
def test_stages_send_every_parameter_once(more):
    """All stages together send the model's parameters, tied embeddings and padding only once, and float32 biases."""
    a = arguments(*more)
    shape, layout = ModelShape.from_args(a), pipeline_layout(a)
    width = 4 if "--fp32" in more else 2
    sizes = [stage_tensor_bytes(shape, layout.of_rank(rank), width) for rank in range(2)]
    parameters = model_parameters(shape, mtp="--mtp-num-layers" in more).total()
    moe_layers = 4 + ("--mtp-num-layers" in more)
    assert sum(map(sum, sizes)) == parameters * width + moe_layers * 4 * 4
    assert len(sizes[0]) != len(sizes[1])  # unequal stages: a swapped stage would show


@pytest.mark.parametrize(
    "more, transport, requests, groups",
    [
        (["--colocate"], "tensor", None, [("engine 0", 2), ("engine 1", 2)]),
        (["--rollout-num-gpus", "6"], "distributed", None, [("slime-pp_0", 7), ("slime-pp_1", 7)]),
        (["--rollout-num-gpus", "4", "--update-weight-transport", "disk"], "disk", 2, []),
    ],
)
def test_transports(more, transport, requests, groups):
    """Who gets what, and how often, for each way that the trainer can choose."""
    a = arguments(*more, "--update-weight-buffer-size", "20000")
    shape, layout = ModelShape.from_args(a), pipeline_layout(a)
    engines = [2] * ((a.rollout_num_gpus or 4) // 2)
    sync = plan_weight_sync(a, shape, layout, senders=[0, 2], engine_gpus=engines, network_gb_per_s=0.5)
    assert transport_of(a) == sync.transport == transport
    assert [stage.sender for stage in sync.stages] == [0, 2]
    assert (
        sync.bytes
        == sum(stage.bytes for stage in sync.stages)
        == sum(sum(stage_tensor_bytes(shape, layout.of_rank(rank), 2)) for rank in range(2))
    )
    assert sync.requests == (requests if requests is not None else len(engines) * sync.buckets)
    assert sync.buckets > 10
    assert list(sync.groups) == groups
    assert sync.receivers == sum(engines)
    once = sync.bytes / 0.5e9
    assert sync.seconds == pytest.approx(2 * once if transport == "disk" else once)
