"""Estimates of memory against bytes of the real trainer, Megatron's real schedule, and hand-made arithmetic."""

import dataclasses
import math
from argparse import Namespace
from typing import Any

import pytest

from slime.plan import engine_memory as engines
from slime.plan import memory as plan
from slime.plan.activations import Activations, Setting, in_flight, layer_bytes, loss_bytes, stage_activations
from slime.plan.parameters import Parameters, Sizes, Tensors, padded_elements
from slime.utils.layout.chunks import Chunk, PipelineLayout
from slime.utils.model_shape import DeltaNet, Dense, Experts, GroupedQuery, Indexer, Latent, LayerShape, ModelShape
from tests.helpers.gloo import run_ranks

TOKENS = 256


def _measure(rank: int, world_size: int, cases: list[tuple[str, list[str], bool]]) -> list[dict[str, Any]]:
    """Per case (model, flags, bf16): what the benchmark's `measure` counts on this rank, and the plan's estimate."""
    import logging

    from slime.utils.accelerator import get_accelerator

    get_accelerator("cpu").prepare_trainer()
    import tests.benchmarks.measure_memory as bench

    logging.disable(logging.WARNING)
    results = []
    for model, flags, bf16 in cases:
        driver = bench.driver_args([*bench.model_flags(model, tiny=True), *flags], "cpu", bf16)
        args = bench.start(driver, None, rank, world_size)
        measured = bench.measure(args, TOKENS, "cpu")
        results.append({"measured": measured, "estimate": bench.estimate(args, TOKENS)})
        bench.stop()
    return results


FULL = "--recompute-granularity full --recompute-num-layers"
ONE_RANK = {
    "dense": ("dense", [], False),
    "dense in bf16": ("dense", [], True),
    "dense in bf16, gradients too": ("dense", ["--grad-reduce-in-bf16"], True),
    "experts": ("moe", [], False),
    "latent attention": ("mla", [], False),
    "attention recomputed": ("mla", ["--recompute-granularity", "selective"], False),
    "MLP recomputed": ("dense", "--recompute-granularity selective --recompute-modules mlp".split(), False),
    "experts recomputed": ("moe", "--recompute-granularity selective --recompute-modules moe".split(), False),
    "all layers recomputed": ("dense", [*FULL.split(), "1", "--recompute-method", "uniform"], False),
    "layers recomputed in pairs": ("moe", [*FULL.split(), "2", "--recompute-method", "uniform"], False),
    "one layer recomputed": ("moe", [*FULL.split(), "1", "--recompute-method", "block"], False),
}
TWO_RANKS = {
    "data parallel": ("dense", [], False),
    "data parallel in bf16": ("dense", [], True),
    "tensor parallel": ("dense", "--tensor-model-parallel-size 2 --sequence-parallel".split(), False),
    "tensor parallel, latent": ("mla", "--tensor-model-parallel-size 2 --sequence-parallel".split(), True),
    "context parallel": ("dense", "--context-parallel-size 2".split(), False),
    "expert parallel": ("moe", "--expert-model-parallel-size 2".split(), False),
    "expert tensor parallel": (
        "moe",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1".split(),
        True,
    ),
}


def _alone(rank: int, world_size: int, cases: list[Any], schedules: list[Any]) -> tuple[list[Any], list[Any]]:
    return _measure(rank, world_size, cases), _schedules(schedules)


@pytest.fixture(scope="module")
def alone():
    """One process imports Megatron for both."""
    ((cases, schedules),) = run_ranks(_alone, 1, list(ONE_RANK.values()), SCHEDULES)
    return dict(zip(ONE_RANK, cases, strict=True)), schedules


@pytest.fixture(scope="module")
def two_ranks():
    by_rank = run_ranks(_measure, 2, list(TWO_RANKS.values()))
    return {name: [results[i] for results in by_rank] for i, name in enumerate(TWO_RANKS)}


@pytest.mark.parametrize("case", ONE_RANK)
def test_one_rank_takes_what_the_plan_says(alone, case):
    """Buffers and states to the byte, padding included; kept activations within a twentieth."""
    measured, estimate = alone[0][case]["measured"], alone[0][case]["estimate"]
    for part in ("weights", "gradients", "optimizer"):
        assert estimate[part] == pytest.approx(measured[part], rel=0.01), part
    if not ONE_RANK[case][2]:  # in bf16 torch's norms compute through float32 copies on the CPU, not on a GPU
        assert estimate["activations"] == pytest.approx(measured["activations"], rel=0.06)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_take_what_the_plan_says(two_ranks, case):
    """Splitting tensors, experts, optimizer states: the sum over ranks is compared, they share the padding unevenly.

    A count that forgot that experts have a data-parallel group of their own was twice the real optimizer's."""
    parts = {"weights": 0.01, "gradients": 0.01, "optimizer": 0.02}
    if not TWO_RANKS[case][2]:
        parts["activations"] = 0.06
    for part, tolerance in parts.items():
        measured, estimate = (sum(r[k][part] for r in two_ranks[case]) for k in ("measured", "estimate"))
        assert estimate == pytest.approx(measured, rel=tolerance), part


def _schedules(cases: list[tuple[int, int, int, int]]) -> list[list[list[int]]]:
    """Per case (pp, vp, group, micro-batches) and pipeline rank: the most micro-batches each chunk held at the moment
    when most were held, by Megatron's own order of chunks and its number of warm-up passes."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    results = []
    for pp, vp, group, micro_batches in cases:
        peaks = []
        for pp_rank in range(pp):
            parallel_state.set_pipeline_model_parallel_world_size(pp)
            parallel_state.set_pipeline_model_parallel_rank(pp_rank)
            parallel_state.set_virtual_pipeline_model_parallel_world_size(vp if vp > 1 else None)
            total, _, warm_up, _ = schedules.get_pp_rank_microbatches(micro_batches, vp, group)
            if vp == 1:
                forward = [0] * micro_batches
            else:
                forward = [chunk for _, chunk in schedules.get_schedule_table(micro_batches, vp, group)]
            backward = [vp - 1 - chunk for chunk in forward]
            held, most = [0] * vp, [0] * vp
            done = 0
            for number, chunk in enumerate(forward):
                held[chunk] += 1
                if sum(held) > sum(most):
                    most = list(held)
                if number >= warm_up:
                    held[backward[done]] -= 1
                    done += 1
            assert total == len(forward)
            peaks.append(most)
        results.append(peaks)
    parallel_state.destroy_model_parallel()
    return results


SCHEDULES = [(1, 1, 1, 8), (4, 1, 4, 16), (4, 1, 4, 2), (4, 2, 4, 16), (2, 3, 2, 8), (4, 2, 6, 12), (8, 4, 8, 16)]


def test_micro_batches_in_flight_are_megatrons(alone):
    """How many activations pile up on a stage, with and without virtual stages, and when a step has few."""
    for (pp, vp, group, micro_batches), peaks in zip(SCHEDULES, alone[1], strict=True):
        mine = [in_flight(pp, vp, rank, group, micro_batches) for rank in range(pp)]
        assert mine == peaks, (pp, vp, group, micro_batches)


def test_loss_peak_by_hand():
    """8,000 tokens, 6,000 of a response, 32,000 columns: a chunk of logits beside the hidden states, whatever T is."""
    sizes = {"tokens": 8000, "response_tokens": 6000, "columns": 32000, "hidden": 64, "width": 2}
    states = 2 * 2 * 8000 * 64
    assert loss_bytes(**sizes) == states + 2 * 6000 * (32000 + 2 * 64)
    assert loss_bytes(**sizes, chunk_size=100) == states + 2 * 100 * (32000 + 2 * 64)
    assert loss_bytes(**sizes, chunk_size=10, overlapped=True) == states + 2 * 32000 * 64
    many = {"tokens": 80_000, "response_tokens": 60_000}
    assert loss_bytes(**sizes | many) == 10 * states + 2 * 8192 * (32000 + 2 * 64)
    assert loss_bytes(**sizes | many | {"columns": 154_880}) < 10 * states + 1.1 * 2**30
    assert loss_bytes(**sizes, whole_logits=True) == states + 2 * 4 * 8000 * 32000


def _flags(**changes: Any) -> Namespace:
    values = {
        "enable_mtp_training": True,
        "bf16": True,
        "fp16": False,
        "accumulate_allreduce_grads_in_fp32": False,
        "grad_reduce_in_bf16": False,
        "main_grads_dtype": "fp32",
        "main_params_dtype": "fp32",
        "exp_avg_dtype": "fp32",
        "exp_avg_sq_dtype": "fp32",
        "optimizer": "adam",
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 1.0,
        "use_precision_aware_optimizer": False,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "data_pad_size_multiplier": 128,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 8192,
        "micro_batch_size": 1,
        "rollout_max_context_len": None,
        "rollout_max_prompt_len": None,
        "rollout_max_response_len": 1024,
        "kl_coef": 0.0,
        "use_kl_loss": False,
        "use_opd": False,
        "keep_old_actor": False,
        "num_distributed_optimizer_instances": 1,
    }
    return Namespace(**(values | changes))


@pytest.mark.parametrize(
    "changes, width, gradient",
    [
        ({}, 2, 4),
        ({"grad_reduce_in_bf16": True}, 2, 2),
        ({"main_grads_dtype": "bf16"}, 2, 2),
        ({"bf16": False, "fp16": True}, 2, 2),
        ({"bf16": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, 2, 4),
        ({"bf16": False}, 4, 4),
    ],
)
def test_width_of_gradients(changes, width, gradient):
    """Megatron turns float32 gradients on for bf16 by itself: half of the memory would be missing otherwise."""
    assert plan.gradient_bytes(_flags(**changes), width) == gradient


PRECISE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    "changes, width, device, host",
    [
        ({}, 2, 12, 0),
        ({"bf16": False}, 4, 8, 0),
        (PRECISE, 2, 10, 0),
        (PRECISE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}, 2, 5, 0),
        (PRECISE | {"optimizer_cpu_offload": True}, 2, 0, 16),
        (PRECISE | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25}, 2, 12, 4),
        ({"optimizer": "sgd"}, 2, 8, 0),
    ],
)
def test_optimizer_bytes_of_a_parameter(changes, width, device, host):
    """Where master weights and moments are, and in which precision."""
    assert plan.optimizer_bytes_per_parameter(_flags(**changes), width) == (device, host)


@pytest.mark.parametrize(
    "changes, tokens",
    [
        ({}, 8192),
        ({"max_tokens_per_gpu": 8200}, 8320),  # padded to 128
        ({"max_tokens_per_gpu": 8200, "tensor_model_parallel_size": 8}, 9216),  # to 8 x 128
        ({"rollout_max_response_len": 32768}, 32768),  # one sample longer than a micro-batch
        ({"rollout_max_response_len": 32768, "rollout_max_prompt_len": 2048}, 34816),
        ({"rollout_max_response_len": 32768, "rollout_max_prompt_len": 2048, "rollout_max_context_len": 16384}, 16384),
        ({"rollout_max_response_len": 32768, "context_parallel_size": 8}, 8192),
        ({"use_dynamic_batch_size": False, "micro_batch_size": 3}, 3072),
    ],
)
def test_tokens_of_the_largest_micro_batch(changes, tokens):
    """A 32k response in 8k micro-batches still has to fit in one: runs died of it after hours."""
    assert plan.tokens_per_rank(_flags(**changes)) == tokens


def test_buffer_padding():
    """Each tensor starts at a multiple of 64 elements, the buffer ends at one of lcm(shards, 128)."""
    tensors = (Tensors("a", 100, 3, False, True), Tensors("b", 64, 1, False, True), Tensors("c", 7, 2, True, True))
    parameters = Parameters((*tensors, Tensors("frozen", 1000, 1, False, False)), 0, 1.0)
    assert padded_elements(parameters, False, 3) == math.ceil((3 * 128 + 64) / 384) * 384
    assert padded_elements(parameters, True, 1) == 128


def test_shards_of_experts_and_others():
    """32 ranks, tp 2, cp 2, ep 4 with one expert rank a tensor: 16 ranks share a dense shard, 8 an expert's."""
    a, sizes = _flags(), Sizes(tp=2, pp=1, cp=2, ep=4, etp=1, dp=8, edp=8)
    assert plan.shards(a, sizes, expert=False) == 16
    assert plan.shards(a, sizes, expert=True) == 8
    assert plan.shards(_flags(num_distributed_optimizer_instances=4), sizes, expert=False) == 4


@pytest.mark.parametrize(
    "changes, copies",
    [({}, 0), ({"use_kl_loss": True}, 2), ({"kl_coef": 0.1}, 2), ({"use_opd": True, "opd_type": "megatron"}, 2)],
)
def test_copies_of_the_weights_on_the_host(changes, copies):
    """A reference model costs two: its own, and the actor's while the reference is on the device."""
    assert plan.replicas(_flags(**changes)) == copies


QWEN3_4B = LayerShape(GroupedQuery(32, 8, 128, False, False, "head", False), Dense(9728, True, False), False)
GLM52 = LayerShape(
    Latent(64, 2048, 512, 192, 64, 256, True, Indexer(32, 128, 2048, True)), Dense(1, True, False), False
)
DEEPSEEK = LayerShape(Latent(128, 1536, 512, 128, 64, 128, True, None), Dense(1, True, False), False)
LINEAR = LayerShape(DeltaNet(16, 32, 128, 128, 4), Dense(1, True, False), False)


def test_cache_of_a_token():
    """Bytes a token and layer: grouped query 2 x heads x 128 x 2 (one head at least), MLA 576 numbers on every device,
    sparse attention 132 for the index key more, linear attention none but a state a request."""
    assert engines.kv_bytes(QWEN3_4B, 1, "auto", 2) == 4096
    assert engines.kv_bytes(QWEN3_4B, 2, "fp8_e4m3", 2) == 1024
    assert engines.kv_bytes(QWEN3_4B, 16, "auto", 2) == 512
    assert engines.kv_bytes(DEEPSEEK, 8, "auto", 2) == 1152
    assert engines.kv_bytes(GLM52, 8, None, 2) == 1152 + 132
    assert engines.kv_bytes(GLM52, 8, "fp8_e4m3", 2) == 512 + 4 * 4 + 128 + 132
    assert engines.kv_bytes(LINEAR, 1, "auto", 2) == 0
    assert engines.state_bytes(LINEAR, 2, 2) == (32 * 128 * 128 * 4 + (2 * 2048 + 4096) * 3 * 2) // 2
    assert engines.state_bytes(QWEN3_4B, 1, 2) == 0


def _model(layer: LayerShape, layers: int, tied: bool = False) -> ModelShape:
    values = {"hidden": 6144, "vocab": 154880, "vocab_divisor": 16, "padded_vocab": None, "tied": tied}
    return ModelShape(
        **values,
        norm_vectors=1,
        positions=0,
        layers=(layer,) * layers,
        mtp_layers=0,
        mtp_layer=None,
        uncounted=(),
    )


MOE = LayerShape(GLM52.attention, Experts(256, 8, 2048, True, 2048, False, True), False)
TABLE = 154880 * 6144
# elements of one GLM-5.2 MoE layer: attention split by TP, attention whole (projections down, indexer, norms), ...
SPLIT = 64 * 256 * 2048 + 64 * (192 + 256) * 512 + 64 * 256 * 6144
KV_UP = 64 * (192 + 256) * 512
WHOLE = (2048 + 576) * 6144 + 2048 + 512 + (32 * 128 * 2048 + 128 * 6144 + 256 + 32 * 6144) + 2 * 6144 + 256 * 6144
EXPERT, SHARED = 256 * 3 * 2048 * 6144, 3 * 2048 * 6144


def _engine(**sglang: Any) -> Namespace:
    flags = {f"sglang_{name}": value for name, value in sglang.items()}
    return _flags(colocate=False, hf_config=None, **flags)


def test_weights_of_an_engine():
    """Tensor parallel; data-parallel attention over 8 of 64 with experts spread by DeepEP; in fp8; two stages."""
    shape = _model(MOE, 4)
    plain = engines.engine_memory(_engine(tp_size=8), 141 * 2**30, shape=shape)
    assert plain.weights == 2 * (4 * ((SPLIT + KV_UP + EXPERT + SHARED) // 8 + WHOLE) + 2 * TABLE // 8)
    wide = {
        "tp_size": 64,
        "dp_size": 8,
        "enable_dp_attention": True,
        "moe_a2a_backend": "deepep",
        "moe_dense_tp_size": 1,
    }
    deepep = engines.engine_memory(_engine(**wide), 141 * 2**30, shape=shape)
    assert (deepep.attention_tp, deepep.ep) == (8, 64)
    layer = (SPLIT + KV_UP) // 8 + WHOLE + EXPERT // 64 + SHARED
    assert deepep.weights == 2 * (4 * layer + TABLE // 8 + TABLE // 64)
    head = engines.engine_memory(_engine(**wide, enable_dp_lm_head=True), 141 * 2**30, shape=shape)
    assert head.weights - deepep.weights == 2 * (TABLE // 8 - TABLE // 64)
    fp8 = _engine(tp_size=8)
    fp8.hf_config = {"quantization_config": {"quant_method": "fp8"}}
    quantized = engines.engine_memory(fp8, 141 * 2**30, shape=shape).weights
    assert 0.5 < quantized / plain.weights < 0.55  # norms, router, embeddings and index weights stay
    staged = engines.engine_memory(_engine(tp_size=8, pp_size=2), 141 * 2**30, shape=shape)
    assert staged.weights == pytest.approx(plain.weights / 2, rel=0.01)


def test_cache_and_requests_of_an_engine():
    """What mem_fraction_static leaves beside the weights, in tokens, for each group of data-parallel attention."""
    shape = _model(GLM52, 4)
    flags = {"tp_size": 8, "mem_fraction_static": 0.5, "context_length": 32768}
    memory = engines.engine_memory(_engine(**flags), 80 * 2**30, shape=shape)
    assert memory.cache == 40 * 2**30 - memory.weights and memory.kv_per_token == 4 * 1284
    assert memory.tokens == memory.cache // (4 * 1284)
    assert memory.requests_at_context == memory.tokens // 32768 and memory.fits
    groups = engines.engine_memory(_engine(**flags, dp_size=8, enable_dp_attention=True), 80 * 2**30, shape=shape)
    assert groups.attention_tp == 1 and groups.tokens == 8 * (groups.cache // (4 * 1284))
    capped = engines.engine_memory(_engine(**flags, max_running_requests=3), 80 * 2**30, shape=shape)
    assert capped.requests_at_context == 3
    other = engines.engine_memory(_engine(**flags), 80 * 2**30, shape=shape, overrides={"tp_size": 2})
    assert other.tp == 2 and other.weights > 3 * memory.weights
    assert not engines.engine_memory(_engine(**flags), 8 * 2**30, shape=_model(MOE, 40)).fits
    draft = engines.engine_memory(_engine(**flags, speculative_algorithm="EAGLE"), 80 * 2**30, shape=shape)
    assert draft.kv_per_token == 5 * 1284 and draft.weights > memory.weights


@pytest.mark.parametrize(
    "sglang, gib, fraction",
    [
        ({"tp_size": 1}, 141, 1 - (512 + 12288 + 128 + 512) / (141 * 1024)),
        ({"tp_size": 8}, 80, 1 - (512 + 12288 + 1024 + 1024) / (80 * 1024)),
        ({"tp_size": 8, "moe_a2a_backend": "deepep"}, 80, 1 - (512 + 12288 + 1024 + 1024 + 2048) / (80 * 1024)),
    ],
)
def test_default_memory_fraction(sglang, gib, fraction):
    """SGLang's own formula, worked by hand: 512 + 1.5 x 8192 + 1024 tp / 8 + 2 x (256, or 512 from tp 4 on) MiB."""
    memory = engines.engine_memory(_engine(**sglang), gib * 2**30, shape=_model(GLM52, 2))
    assert memory.mem_fraction == round(fraction, 3)


def test_host_memory_of_a_node():
    """Eight trainers a node: processes, optimizer, copies; a pinned tensor takes a power of two."""
    parameters = Parameters((Tensors("a", 3 * 2**20, 2, False, True),), 0, 1.0)
    assert plan._pinned(parameters, 2) == 2 * 8 * 2**20
    activations = Activations(0, 0.0, 0, 0, 0)
    small, large = (
        plan.RankMemory(rank, parameters, 5, 7, 11, activations, 3, 0, 100 * (rank + 1), 20, 23) for rank in (0, 1)
    )
    a = _flags(actor_num_gpus_per_node=8, num_gpus_per_node=8, rollout_num_gpus=16, colocate=True, use_critic=False)
    host = plan.host_memory(a, [small, large])
    assert (host.optimizer, host.replicas, host.offload) == (1600, 160, 184)
    assert host.processes == 16 * plan.PROCESS_HOST and host.total == host.processes + 1944
    a.sglang_enable_weights_cpu_backup = True
    assert plan.host_memory(a, [small], engine_weights=10).engine_backup == 80
    assert large.resident == 23 and large.update_peak(1000) == 23 + 3 + 1000


def test_full_recomputation_by_hand():
    """A stage of 4 mixture layers, 4,096 tokens, two ranks of TP: only layer inputs are kept; the layer under way is
    recomputed; Megatron's dispatcher holds on to input and gradient of each layer (measured: 2 x layers x T H b)."""
    shape = _model(LayerShape(QWEN3_4B.attention, Experts(8, 2, 1536, True, 0, False, False), False), 4)
    setting = Setting(Sizes(2, 1, 1, 1, 1, 1, 1), True, 2, False, False, False, "uniform", 1, frozenset())
    layout = PipelineLayout((Chunk(0, 0, (0, 1, 2, 3), True, True, ()),), 1, 1)
    found = stage_activations(shape, layout, 0, setting, 4096, loss=1000)
    row = 4096 * 6144 * 2 // 2
    assert found.micro_batch == found.retained == 4 * row + 2 * row  # and the last norm's input and output
    assert found.held == 2 * 4 * row and found.loss == 1000
    layer = layer_bytes(shape.layers[0], 6144, setting, 4096)
    assert found.backward > layer + 4 * row
    without = stage_activations(shape, layout, 0, dataclasses.replace(setting, full=None), 4096, loss=0)
    assert without.held == 0 and without.retained == round(4 * layer) + 2 * row


def test_the_update_can_be_the_peak():
    """With few tokens and many parameters the temporaries of the update count more than activations."""
    parameters = Parameters((Tensors("a", 64, 1, False, True),), 0, 1.0)
    rank = plan.RankMemory(0, parameters, 1, 2, 3, Activations(5, 1.0, 5, 1, 2), 0, 10, 0, 0, 0, optimizer_step=50)
    assert rank.training == 6 + 50 + 10 and rank.step_peak == 50


def test_selective_recomputation_has_megatrons_default():
    """--recompute-granularity selective without modules recomputes the core attention."""
    base = {
        "accelerator": "cuda",
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": None,
        "sequence_parallel": False,
        "bias_swiglu_fusion": True,
        "moe_permute_fusion": True,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "world_size": 8,
    }
    assert Setting.from_args(_flags(**base, recompute_granularity="selective")).modules == {"core_attn"}
    assert Setting.from_args(_flags(**base, recompute_granularity=None)).modules == frozenset()
