"""The layer spec of Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts."""

from argparse import Namespace

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slime_plugins.models.gated_delta_net import hybrid_block_spec


def get_qwen3_next_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of one (virtual) pipeline stage. ValueError for model arguments that are not this family's."""
    return hybrid_block_spec(config, vp_stage)
