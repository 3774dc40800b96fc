"""Device and host memory of the trainer, rank by rank, as sums of named parts with a formula each.

Reads the arguments and `parameters`, `activations`; measures nothing and imports neither torch nor megatron.
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from slime.plan.activations import FLOAT32, Activations, Setting, loss_bytes, stage_activations
from slime.plan.parameters import Parameters, Sizes, layer_rows, padded_elements, parameters_of_rank
from slime.utils.layout.chunks import PipelineLayout
from slime.utils.layout.pipeline import pipeline_layout
from slime.utils.model_shape import ModelShape

GIB = 2**30
# Outside torch's allocator a trainer alone on an H200 holds 2.04 GiB (CUDA context, kernels, NCCL for a world of one),
# which stay when it moves off the device. More communicators and fragmentation are an allowance.
SLEEPING_TRAINER = int(2.1 * GIB)
TRAINER_RESERVE = 3 * GIB
SLEEPING_ENGINE = 2 * GIB  # what an SGLang server of one GPU keeps after it released weights and cache (measured 1.9)
PROCESS_HOST = 4 * GIB  # allowance: interpreter, libraries and staging buffers of one trainer or engine process

_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1, "uint8": 1}
_MOMENTS = {"sgd": 1, "lion": 1}  # numbers an optimizer keeps a parameter; Adam and the others 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of every rank of one pipeline stage, and what each of these ranks keeps on the host."""

    pp_rank: int
    parameters: Parameters
    weights: int
    gradients: int
    optimizer: int
    activations: Activations
    weight_sync: int
    reserve: int
    host_optimizer: int
    host_replicas: int
    host_offload: int
    optimizer_step: int = 0  # temporaries of the update, and what is still held of the last micro-batch

    @property
    def resident(self) -> int:
        """What stays between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def step_peak(self) -> int:
        """What a training step needs beside what stays: forward and backward passes, or the update after them."""
        return max(self.activations.peak, self.optimizer_step)

    @property
    def training(self) -> int:
        """The peak of a training step."""
        return self.resident + self.step_peak + self.reserve

    @property
    def peak(self) -> int:
        """The most at any time, colocated engines apart (see `update_peak`)."""
        return max(self.training, self.resident + self.weight_sync + self.reserve)

    @property
    def host(self) -> int:
        """Bytes of host memory of one such rank."""
        return PROCESS_HOST + self.host_optimizer + self.host_replicas + self.host_offload

    def update_peak(self, engine_weights: int) -> int:
        """The peak of a weight update on a device shared with an engine, whose weights are back but not its cache."""
        return self.resident + self.weight_sync + self.reserve + engine_weights


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory on the fullest node, by part; the node's ranks are all taken to be like the fullest."""

    processes: int
    optimizer: int
    replicas: int
    offload: int
    engine_backup: int

    @property
    def total(self) -> int:
        return self.processes + self.optimizer + self.replicas + self.offload + self.engine_backup


def trainer_memory(
    a: Namespace,
    *,
    shape: ModelShape | None = None,
    layout: PipelineLayout | None = None,
    tokens: int | None = None,
    response_tokens: int | None = None,
    micro_batches: int | None = None,
) -> list[RankMemory]:
    """One RankMemory a pipeline stage, in order; within a stage all ranks hold equally much.

    tokens: of a micro-batch on one context-parallel rank, by default `tokens_per_rank(a)`. response_tokens: those
    whose log-probability is taken, by default all. micro_batches: of an optimizer step on one data-parallel rank.
    """
    shape = shape or ModelShape.from_args(a)
    layout = layout or pipeline_layout(a)
    setting = Setting.from_args(a)
    tokens = tokens_per_rank(a) if tokens is None else tokens
    columns = shape.vocab_rows(setting.sizes.tp) // setting.sizes.tp
    loss = loss_bytes(
        tokens,
        response_tokens or tokens,
        columns,
        shape.hidden,
        setting.width,
        a.log_probs_chunk_size,
        a.overlap_grad_reduce,
        a.loss_type == "custom_loss",
    )
    group = getattr(a, "microbatch_group_size_per_vp_stage", None)
    freeze = [*(a.freeze_params_name_list or ()), *(() if a.enable_mtp_training else (r"^mtp\.",))]
    freeze += [] if a.dsa_indexer_loss_coeff else [r"\.indexer\."]
    ranks = []
    for pp_rank in range(layout.pp_size):
        activations = stage_activations(shape, layout, pp_rank, setting, tokens, loss, group, micro_batches)
        parameters = parameters_of_rank(shape, layout, setting.sizes, pp_rank, a.only_train_params_name_list, freeze)
        ranks.append(_rank(a, shape, setting, pp_rank, parameters, activations))
    return ranks


def _rank(
    a: Namespace, shape: ModelShape, setting: Setting, pp_rank: int, parameters: Parameters, activations: Activations
) -> RankMemory:
    sizes, width = setting.sizes, setting.width
    trained = {expert: padded_elements(parameters, expert, shards(a, sizes, expert)) for expert in (False, True)}
    frozen = parameters.total() - parameters.trained()
    weights = (sum(trained.values()) + frozen) * width + parameters.buffers * FLOAT32
    shard = sum(elements / shards(a, sizes, expert) for expert, elements in trained.items())
    device, host = optimizer_bytes_per_parameter(a, width)
    gradients = sum(trained.values()) * gradient_bytes(a, width)
    resident = weights + gradients + round(shard * device)
    return RankMemory(
        pp_rank=pp_rank,
        parameters=parameters,
        weights=weights,
        gradients=gradients,
        optimizer=round(shard * device),
        activations=activations,
        weight_sync=_weight_sync(a, shape, width),
        reserve=TRAINER_RESERVE + (SLEEPING_ENGINE if a.colocate else 0),
        host_optimizer=round(shard * host),
        host_replicas=replicas(a) * _pinned(parameters, width),
        host_offload=resident if a.offload_train else 0,
        optimizer_step=activations.held + (0 if a.optimizer_cpu_offload else round(shard * FLOAT32)),  # denominators
    )


def tokens_per_rank(a: Namespace) -> int:
    """Tokens of the largest micro-batch on one context-parallel rank, padding included.

    Dynamic batches hold max_tokens_per_gpu tokens a rank; a sample longer than max_tokens_per_gpu x CP is a
    micro-batch of its own, so the longest possible sample / CP counts when it is more. Fixed batches hold
    micro_batch_size of the longest sample. The longest sample is the context limit, or prompt and response limits.
    """
    cp, tp = a.context_parallel_size, a.tensor_model_parallel_size
    longest = longest_sample(a)
    if a.use_dynamic_batch_size:
        tokens = max(a.max_tokens_per_gpu or 0, -(-longest // cp))
    else:
        tokens = a.micro_batch_size * -(-longest // cp)
    unit = tp * (a.data_pad_size_multiplier or 1)
    return max(-(-tokens // unit), 1) * unit


def longest_sample(a: Namespace) -> int:
    """Tokens of the longest sample the limits allow: the context's, or the prompt's (if limited) and response's."""
    if a.rollout_max_context_len:
        return a.rollout_max_context_len
    return (a.rollout_max_prompt_len or 0) + (a.rollout_max_response_len or 0)


def shards(a: Namespace, sizes: Sizes, expert: bool) -> int:
    """Over how many ranks the distributed optimizer splits parameters: DP x CP, for routed experts their own DP."""
    ranks = sizes.edp if expert and sizes.separate_experts else sizes.dp * sizes.cp
    return max(ranks // (a.num_distributed_optimizer_instances or 1), 1)


def gradient_bytes(a: Namespace, width: int) -> int:
    """Bytes of a parameter's gradient in the buffer that is reduced over data-parallel ranks.

    4 for fp32 parameters and for bf16 ones, unless --grad-reduce-in-bf16 or --main-grads-dtype bf16 says 2; for fp16
    ones 2, unless --accumulate-allreduce-grads-in-fp32.
    """
    if width == FLOAT32 or a.accumulate_allreduce_grads_in_fp32 and not a.grad_reduce_in_bf16:
        return FLOAT32
    in_float32 = a.bf16 and not a.grad_reduce_in_bf16 and dtype_bytes(a.main_grads_dtype) == FLOAT32
    return FLOAT32 if in_float32 else width


def optimizer_bytes_per_parameter(a: Namespace, width: int) -> tuple[float, float]:
    """(device, host) bytes for each parameter of a rank's optimizer shard.

    Half-precision training keeps a float32 master copy (4) and Adam's two moments (4 + 4), fp32 training only the
    moments. --use-precision-aware-optimizer: moments in their dtypes, and of a float32 master of bf16 weights only the
    16 bits the weight lacks (2). --optimizer-cpu-offload moves a fraction f to the host, as float32 master, moments
    and gradient (16 f); what stays is float32, with a float32 gradient during the step (16 (1 - f)).
    """
    moments = _MOMENTS.get(a.optimizer, 2)
    if a.optimizer_cpu_offload:
        fraction = a.optimizer_offload_fraction
        each = FLOAT32 * (2 + moments)
        return each * (1 - fraction), each * fraction
    if a.use_precision_aware_optimizer:
        master = 2 if a.bf16 else dtype_bytes(a.main_params_dtype)
        return master + dtype_bytes(a.exp_avg_dtype) + dtype_bytes(a.exp_avg_sq_dtype), 0
    return FLOAT32 * (moments + (width < FLOAT32)), 0


def dtype_bytes(dtype: Any) -> int:
    """Bytes of a number of Megatron's --*-dtype flags, given as their text or as a torch dtype."""
    return _BYTES[str(dtype).removeprefix("torch.")]


def replicas(a: Namespace) -> int:
    """Copies of a rank's weights on the host: reference model, teacher, older actors, and the actor beside them."""
    others = int(a.kl_coef != 0 or a.use_kl_loss)
    others += int(a.use_opd and getattr(a, "opd_type", None) == "megatron")
    if a.keep_old_actor:
        others += 2 if getattr(a, "update_weights_interval", 1) == 1 else 1
    return others + 1 if others else 0


def _pinned(parameters: Parameters, width: int) -> int:
    """Host bytes of one copy: torch gives every pinned tensor a block of the next power of two bytes."""
    tensors = sum(t.count * _power_of_two(t.elements * width) for t in parameters.tensors)
    return tensors + parameters.buffers * FLOAT32


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _weight_sync(a: Namespace, shape: ModelShape, width: int) -> int:
    """Buffers of a weight push: a bucket of whole tensors gathered over TP, its flat form, and for engines on the same
    device the copy they open. A tensor larger than --update-weight-buffer-size is a bucket of its own."""
    whole = max(row.elements for layer in set(shape.layers) for row in layer_rows(layer, shape.hidden, 1))
    bucket = max(a.update_weight_buffer_size, max(whole, shape.vocab * shape.hidden) * width)
    return bucket * (3 if a.colocate else 1 if a.update_weight_transport == "disk" else 2)


def host_memory(a: Namespace, ranks: list[RankMemory], engine_weights: int = 0) -> HostMemory:
    """Host memory of a node: its trainers (of both roles), and with --colocate or engines of its own their processes.

    engine_weights: bytes a GPU of an engine's weights, kept on the host while released if
    --sglang-enable-weights-cpu-backup asks for it.
    """
    actors = a.actor_num_gpus_per_node if ranks else 0
    trainers = actors * 2 if a.use_critic else actors  # a critic is as large as the actor
    engines = min(a.num_gpus_per_node, a.rollout_num_gpus or 0) if a.colocate or not ranks else 0
    fullest = max(ranks, key=lambda rank: rank.host, default=None)
    backup = engines * engine_weights if getattr(a, "sglang_enable_weights_cpu_backup", False) else 0
    if fullest is None:
        return HostMemory(engines * PROCESS_HOST, 0, 0, 0, backup)
    return HostMemory(
        processes=(trainers + engines) * PROCESS_HOST,
        optimizer=trainers * fullest.host_optimizer,
        replicas=actors * fullest.host_replicas,
        offload=trainers * fullest.host_offload,
        engine_backup=backup,
    )
