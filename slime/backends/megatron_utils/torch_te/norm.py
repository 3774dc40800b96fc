"""RMSNorm and LayerNorm with Transformer Engine's constructor and parameter names."""

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: TransformerConfig, eps: float
) -> torch.Tensor:
    """x: [..., n] normalised over its last dimension, in x's dtype; weight, bias: [n].

    With layernorm_zero_centered_gamma the stored weight is gamma - 1.
    """
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, (x.size(-1),), weight, eps)
    return F.layer_norm(x, (x.size(-1),), weight, bias, eps)


def norm_parameters(config: TransformerConfig, size: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    """Fresh (weight, bias) of a norm over `size` features; RMSNorm has no bias.

    Marked sequence_parallel, so that mcore sums their gradients over the TP group when each rank sees part of the
    sequence.
    """
    fill = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = torch.nn.Parameter(fill(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    weight.sequence_parallel = config.sequence_parallel
    if config.normalization == "RMSNorm":
        return weight, None
    bias = torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    bias.sequence_parallel = config.sequence_parallel
    return weight, bias


class Norm(torch.nn.Module):
    """TENorm: config.normalization over the last dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, has_residual: bool = False):
        super().__init__()
        if has_residual and config.fused_residual_rmsnorm:
            raise ValueError("the fused residual norm needs transformer_engine: disable --fused-residual-rmsnorm")
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(f"--normalization {config.normalization}: expected RMSNorm or LayerNorm")
        self.config, self.eps = config, eps
        self.weight, self.bias = norm_parameters(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, self.bias, self.config, self.eps)
