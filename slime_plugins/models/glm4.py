"""The layer spec of dense GLM-4 (0414) and GLM-Z1: norms before and after attention and MLP."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from slime.backends.megatron_utils.layer_specs import decoder_block_spec


class SandwichLayer(TransformerLayer):
    """A transformer layer that also normalises what attention and MLP give, before the residual is added.

    post_norm builds such a norm: (config, hidden_size, eps) -> module.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        post_norm: Callable[..., torch.nn.Module],
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = post_norm(config=config, **sizes)
        self.post_mlp_layernorm = post_norm(config=config, **sizes)
        self.self_attn_bda = _after(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = _after(self.post_mlp_layernorm, self.mlp_bda)


def _after(norm: torch.nn.Module, bias_dropout_add: Callable[..., Callable]) -> Callable[..., Callable]:
    """Megatron's (training, fused) -> (output with bias, residual, dropout) -> sum, the output normalised first."""

    def build(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add = bias_dropout_add(training, fused)

        def apply(
            output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), residual, dropout)

        return apply

    return build


def get_glm_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one (virtual) pipeline stage."""
    block = decoder_block_spec(config, vp_stage)
    layers = [
        replace(layer, module=SandwichLayer, params={**layer.params, "post_norm": block.layer_norm})
        for layer in block.layer_specs
    ]
    return replace(block, layer_specs=layers)
