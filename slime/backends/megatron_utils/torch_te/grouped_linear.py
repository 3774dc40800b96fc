"""The experts' linears: weight0 .. weightN-1, one matrix product per local expert, with Transformer Engine's names."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class _GroupedLinear(torch.nn.Module):
    """num_gemms weights [output_size, input_size], dimension `axis` split over the expert TP group."""

    axis: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        is_expert: bool,
        pg_collection: ProcessGroupCollection | None = None,
        **unused_by_torch: Any,
    ):
        super().__init__()
        if bias or not is_expert:
            raise ValueError(f"only expert linears without bias exist here, got {bias=}, {is_expert=}")
        self.config, self.num_gemms = config, num_gemms
        self.groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        shape = [output_size, input_size]
        shape[self.axis] //= self.groups.expt_tp.size()
        # mcore reduces the gradients over the dense groups only where the expert groups are the same ones
        same_groups_as_dense = config.expert_model_parallel_size == 1 and (
            config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        for i in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(*shape, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            if config.perform_initialization:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    init_method(weight)
            weight.allreduce = same_groups_as_dense
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, self.axis, 1
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, None]:
        """x: [tokens, input_size] sorted by expert, m_splits: tokens per local expert -> [tokens, output_size]."""
        weights = (getattr(self, f"weight{i}") for i in range(self.num_gemms))
        parts = zip(x.split(list(m_splits)), weights, strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Each expert is one shard of a tensor with a leading expert axis (its own tensor with singleton shards)."""
        metadata = metadata or {}
        first = self.groups.ep.rank() * self.num_gemms
        total = self.groups.ep.size() * self.num_gemms
        singleton = metadata.get("singleton_local_shards", False)
        out = {}
        for i in range(self.num_gemms):
            expert_axis = () if singleton else ((len(sharded_offsets), first + i, total),)
            key = f"{i}.weight"
            shard = make_sharded_tensors_for_checkpoint(
                {key: getattr(self, f"weight{i}")},
                "",
                {key: self.axis},
                (*sharded_offsets, *expert_axis),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(shard, f"{i}.", f"{first + i}.{prefix}" if singleton else prefix)
            tensor = out[f"{prefix}weight{i}"] = shard[key]
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
        return out

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here."""


class ColumnParallelGroupedLinear(_GroupedLinear):
    """TEColumnParallelGroupedLinear: output features split over the expert TP group."""

    axis = 0


class RowParallelGroupedLinear(_GroupedLinear):
    """TERowParallelGroupedLinear: input features split over the expert TP group."""

    axis = 1
