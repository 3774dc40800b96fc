"""Linear layers that exist in Transformer Engine but not in megatron-core: duplicated, and fused with a norm."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slime.backends.megatron_utils.torch_te.norm import norm_parameters, normalize


class DuplicatedLinear(torch.nn.Module):
    """TELinear with parallel_mode "duplicated": every TP rank holds the whole weight [output_size, input_size]."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        parallel_mode: str | None = None,
        **unused_by_torch: Any,
    ):
        super().__init__()
        if parallel_mode != "duplicated" or bias:
            raise ValueError(f"only duplicated linears without bias exist here, got {parallel_mode=}, {bias=}")
        self.config = config
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork("data-parallel-rng"):
                init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel
        self.weight.allreduce = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {}, sharded_offsets)

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here."""


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear: the norm before a column-parallel linear, its weight stored in the linear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight, self.layer_norm_bias = norm_parameters(config, input_size)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        eps = self.config.layernorm_epsilon
        x = normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.config, eps)
        return super().forward(x, *args, **kwargs)
