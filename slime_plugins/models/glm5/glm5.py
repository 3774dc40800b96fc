"""The layer spec of models with sparse latent attention, on Megatron's own modules (DSA).

Which layers compute their own choice of tokens, and which reuse an earlier layer's, follows from the configuration.
"""

from argparse import Namespace

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def get_glm5_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one (virtual) pipeline stage.

    Raises ValueError without --experimental-attention-variant dsa, or when a stage would begin with a layer that
    reuses the choice of a layer of another stage.
    """
    if config.experimental_attention_variant != "dsa":
        raise ValueError(
            f"--experimental-attention-variant {config.experimental_attention_variant}: this layer spec is for dsa"
        )
    return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
