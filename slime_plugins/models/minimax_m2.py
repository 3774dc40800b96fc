"""The layer spec of MiniMax-M2: queries and keys are normalised over all heads together."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slime.backends.megatron_utils.layer_specs import decoder_block_spec


class NormOverHeads(torch.nn.Module):
    """RMSNorm over `size` features, of which this rank holds a share, as it holds one of the weight.

    Only the sum of squares travels between the ranks of the tensor-parallel group, in both directions.
    """

    def __init__(self, config: TransformerConfig, size: int, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.eps, self.size, self.group = config.layernorm_epsilon, size, group
        self.weight = torch.nn.Parameter(
            torch.ones(size // group.size(), dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = True, 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, batch, own heads, head dim], normalised over all heads of all ranks; in x's dtype."""
        wide = x.flatten(2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.group.size() > 1:
            # the sum goes to every rank, and every rank's gradient comes back to each summand
            squares = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(squares, group=self.group), group=self.group
            )
        normed = (wide * torch.rsqrt(squares / self.size + self.eps)).to(x.dtype)
        return (self.weight * normed).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The weight, split over the tensor-parallel group."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )


class MiniMaxAttention(SelfAttention):
    """Self-attention whose query and key norms, q_norm and k_norm, go over all heads together."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.q_norm = NormOverHeads(config, self.query_projection_size, self.pg_collection.tp)
        self.k_norm = NormOverHeads(config, self.kv_projection_size, self.pg_collection.tp)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        query, key, *others = super().get_query_key_value_tensors(*args, **kwargs)
        return self.q_norm(query), self.k_norm(key), *others


def get_minimax_m2_layer_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of one (virtual) pipeline stage.

    ValueError when a query group would be shared by several tensor-parallel ranks, or for norms that are not plain
    RMSNorms.
    """
    tp, groups = config.tensor_model_parallel_size, config.num_query_groups
    if groups % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide --num-query-groups {groups}: the norm over all keys "
            f"needs whole groups on every rank; use at most {groups}"
        )
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        raise ValueError("MiniMax-M2 needs --normalization RMSNorm, without --apply-layernorm-1p")
    block = decoder_block_spec(config, vp_stage)
    return replace(block, layer_specs=[_with_norms_over_heads(layer) for layer in block.layer_specs])


def _with_norms_over_heads(layer: ModuleSpec) -> ModuleSpec:
    attention = layer.submodules.self_attention
    # --qk-layernorm would build norms of single heads
    submodules = replace(attention.submodules, q_layernorm=IdentityOp, k_layernorm=IdentityOp)
    spec = replace(attention, module=MiniMaxAttention, submodules=submodules)
    return replace(layer, submodules=replace(layer.submodules, self_attention=spec))
