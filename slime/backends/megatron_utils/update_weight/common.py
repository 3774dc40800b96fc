"""The local model as a stream of Hugging Face tensors: global names, gathered shards, conversion; collective calls."""

import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.megatron_to_hf import conversion_name, convert_to_hf, family_of, quantization_of
from slime.backends.megatron_utils.megatron_to_hf.family import Family
from slime.backends.megatron_utils.megatron_to_hf.sharding import is_expert, merge_shards, partition_dim
from slime.backends.megatron_utils.update_weight.buckets import Bucket, NamedTensor, atomic_groups, plan_buckets

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


def global_params(chunk: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(local name, global name, local shard) of all parameters and router expert biases of a model chunk.

    Globally, layers and experts are numbered over the whole model. Copies of the embedding on the last pipeline stage
    (tied output layer, prediction layers) are included.
    """
    model = unwrap_model(chunk)
    numbers = {
        part: [layer.layer_number - 1 for layer in getattr(model, part).layers]
        for part in ("decoder", "mtp")
        if hasattr(model, part)
    }
    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("router.expert_bias"))
    for name, param in [*model.named_parameters(), *biases]:
        yield name, _global_name(name, numbers, model.config.num_moe_experts), param


def _global_name(name: str, numbers: dict[str, list[int]], num_experts: int | None) -> str:
    if match := _LAYER.fullmatch(name):
        name = f"{match[1]}.layers.{numbers[match[1]][int(match[2])]}.{match[3]}"
    if match := _EXPERT.fullmatch(name):
        first = mpu.get_expert_model_parallel_rank() * (num_experts // mpu.get_expert_model_parallel_world_size())
        name = f"{match[1]}{first + int(match[2])}"
    return name


def named_params(args: Namespace, model_chunks: Sequence[torch.nn.Module]) -> Iterator[NamedTensor]:
    """(global name with the prefix "module.module.", local shard) of what this pipeline stage exports.

    Without the copies of the embedding that the last stage keeps as tied output layer or for prediction layers.
    """
    for chunk in model_chunks:
        copies = set() if args.untie_embeddings_and_output_weights else {"output_layer.weight"}
        if not unwrap_model(chunk).pre_process:
            copies.add("embedding.word_embeddings.weight")
        for local, name, param in global_params(chunk):
            if local not in copies:
                yield "module.module." + name, param


def all_gather_param(name: str, param: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """The whole parameter from its shards on the (expert) TP group. All ranks of the group call it in the same order.

    blocks: Family.tp_blocks of the parameter.
    """
    group = mpu.get_expert_tensor_parallel_group() if is_expert(name) else mpu.get_tensor_model_parallel_group()
    dim = partition_dim(name, param)
    if dim is None or group.size() == 1:
        return param.detach()
    shards = [torch.empty_like(param) for _ in range(group.size())]
    dist.all_gather(shards, param.detach().contiguous(), group=group)
    return merge_shards(shards, dim, blocks)


def _whole_params(args: Namespace, family: Family, name: str, param: torch.Tensor) -> Iterator[NamedTensor]:
    """The whole parameter, from its TP group; of an expert's, one a rank of its expert-parallel group, in turn.

    All ranks of these groups call it in the same order and consume it to the end. Beside what the caller keeps, one
    parameter is held in memory at a time.
    """
    whole = all_gather_param(name, param, family.tp_blocks(args, name.removeprefix("module.module.")))
    group = mpu.get_expert_model_parallel_group()
    if not is_expert(name) or group.size() == 1:
        yield name, whole
        return
    match = _EXPERT.fullmatch(name)
    per_rank = args.num_experts // group.size()
    for owner in range(group.size()):
        expert = whole.contiguous() if owner == group.rank() else torch.empty_like(whole)
        dist.broadcast(expert, src=dist.get_global_rank(group, owner), group=group)
        yield f"{match[1]}{owner * per_rank + int(match[2]) % per_rank}", expert


def hf_buckets(args: Namespace, model_chunks: Sequence[torch.nn.Module], limit: int) -> Iterator[Bucket]:
    """This pipeline stage's weights as buckets of at most `limit` bytes, a tensor above that alone.

    In the format of --hf-checkpoint: where that is quantised, they are.

    Called in step by whole groups of peers (is_weight_source), and consumed to the end by each.
    """
    model_name, quantization = conversion_name(args), quantization_of(args)
    family = family_of(model_name)
    paired = getattr(unwrap_model(model_chunks[0]).config, "q_lora_rank", None) is not None

    def items() -> Iterator[Bucket]:
        for group in atomic_groups(named_params(args, model_chunks), paired):
            for parts in zip(*(_whole_params(args, family, *member) for member in group), strict=True):
                converted = (convert_to_hf(args, model_name, name, whole, quantization) for name, whole in parts)
                yield [pair for pairs in converted for pair in pairs]

    return plan_buckets(items(), limit)


def is_weight_source(with_peers: bool = False) -> bool:
    """Whether this rank sends its pipeline stage's weights: its first one.

    with_peers: all ranks that it needs for that. They are the first of the stage: as many as hold whole
    tensor-parallel groups and whole sets of experts. Both grids number the ranks of a stage in the same order, data
    parallel outermost.
    """
    tp = mpu.get_tensor_model_parallel_world_size()
    place = mpu.get_data_parallel_rank(with_context_parallel=True) * tp + mpu.get_tensor_model_parallel_rank()
    experts = mpu.get_expert_tensor_parallel_world_size() * mpu.get_expert_model_parallel_world_size()
    return place < (math.lcm(tp, experts) if with_peers else 1)


def agree(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) on every rank, which then all leave together; all raise RuntimeError when one rank failed."""
    result, failure = None, None
    try:
        result = function(*args)
    except Exception as error:  # told to the other ranks, then raised
        failure = error
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(failures):
        if message is not None:
            raise RuntimeError(f"rank {rank} failed in {function.__name__}: {message}")
    return result
