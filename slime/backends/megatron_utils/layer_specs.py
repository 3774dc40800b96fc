"""Megatron's layer specs as the checkpoints of the supported families need them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class LatentAttention(MLASelfAttention):
    """MLASelfAttention whose --qk-layernorm is the norm of what is compressed, and of nothing else.

    Where queries are not compressed (no --q-lora-rank: Moonlight), Megatron 0.19 puts a second norm with weights of
    its own between the layer's norm and the query projection. No published checkpoint has one, and it is no identity.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        classes = super()._resolve_qk_norm_config(submodules)
        if self.config.q_lora_rank is None:
            classes["linear_q_proj"] = submodules.linear_q_proj
        return classes


def decoder_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one (virtual) pipeline stage: dense or latent attention, dense or expert MLPs."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    return replace(block, layer_specs=list(_with_latent_attention(block.layer_specs)))


def _with_latent_attention(layers: list[ModuleSpec]) -> Iterator[ModuleSpec]:
    for layer in layers:
        attention = layer.submodules.self_attention
        if isinstance(attention, ModuleSpec) and attention.module is MLASelfAttention:
            layer = replace(
                layer,
                submodules=replace(layer.submodules, self_attention=replace(attention, module=LatentAttention)),
            )
        yield layer
