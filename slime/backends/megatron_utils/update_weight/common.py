"""The local model as a stream of Hugging Face tensors: global names, TP gathering, conversion; collective calls."""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.megatron_to_hf import conversion_name, convert_to_hf
from slime.backends.megatron_utils.update_weight.buckets import Bucket, NamedTensor, atomic_groups, plan_buckets

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


def named_params(args: Namespace, model_chunks: Sequence[torch.nn.Module]) -> Iterator[NamedTensor]:
    """(global name with the prefix "module.module.", local shard) of all parameters and router expert biases.

    Layers and experts are numbered over the whole model. The copy of tied embeddings that the last pipeline stage
    keeps as its output layer is left out.
    """
    for chunk in model_chunks:
        model = unwrap_model(chunk)
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        biases = ((name, buffer) for name, buffer in model.named_buffers() if "expert_bias" in name)
        for name, param in [*model.named_parameters(), *biases]:
            if name == "output_layer.weight" and not args.untie_embeddings_and_output_weights:
                continue
            yield "module.module." + _global_name(args, name, layers), param


def _global_name(args: Namespace, name: str, layers: Sequence[int]) -> str:
    if match := _LAYER.fullmatch(name):
        name = f"{match[1]}{layers[int(match[2])]}{match[3]}"
    if match := _EXPERT.fullmatch(name):
        first = mpu.get_expert_model_parallel_rank() * (args.num_experts // mpu.get_expert_model_parallel_world_size())
        name = f"{match[1]}{first + int(match[2])}"
    return name


def all_gather_param(name: str, param: torch.Tensor) -> torch.Tensor:
    """The whole parameter from its shards on the (expert) TP group. All ranks of the group call it in the same order.

    linear_fc1 holds (gate, up) on every rank: all gates come first in the result.
    """
    experts = ".experts." in name
    group = mpu.get_expert_tensor_parallel_group() if experts else mpu.get_tensor_model_parallel_group()
    split = getattr(param, "tensor_model_parallel", False) and getattr(param, "parallel_mode", "") != "duplicated"
    if not split or group.size() == 1:
        return param.detach()
    shards = [torch.empty_like(param) for _ in range(group.size())]
    dist.all_gather(shards, param.detach().contiguous(), group=group)
    if ".linear_fc1." in name:
        halves = [shard.chunk(2) for shard in shards]
        shards = [gate for gate, _ in halves] + [up for _, up in halves]
        return torch.cat(shards)
    # grouped linears of Transformer Engine label their second projection with the wrong dimension
    dim = 1 if experts and ".linear_fc2." in name else param.partition_dim
    return torch.cat(shards, dim=dim)


def hf_buckets(args: Namespace, model_chunks: Sequence[torch.nn.Module], limit: int) -> Iterator[Bucket]:
    """This pipeline stage's weights as buckets of at most `limit` bytes. Called by whole TP groups in step.

    ValueError with expert parallelism, whose experts live on ranks outside the TP group.
    """
    if args.expert_model_parallel_size > 1:
        raise ValueError("weights of --expert-model-parallel-size > 1 cannot be exported yet; use 1")
    model_name = conversion_name(args)
    items = (
        [
            pair
            for name, param in group
            for pair in convert_to_hf(args, model_name, name, all_gather_param(name, param))
        ]
        for group in atomic_groups(named_params(args, model_chunks))
    )
    return plan_buckets(items, limit)


def is_weight_source(tensor_parallel_peers: bool = False) -> bool:
    """Whether this rank sends its pipeline stage's weights: first of DP, CP and TP. With peers: its whole TP group."""
    first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    return first and (tensor_parallel_peers or mpu.get_tensor_model_parallel_rank() == 0)


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
