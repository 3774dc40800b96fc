"""Layer specs of models that mix gated delta nets with gated attention, on Megatron's own modules.

Without flash-linear-attention the delta rule runs in plain torch (`gated_delta_rule`), on any device.
"""

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_gated_delta_net_module_spec,
    get_linear_attention_pattern,
)
from megatron.core.ssm import gated_delta_net as megatron_gated_delta_net
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron_utils.layer_specs import decoder_block_spec
from slime_plugins.models import gated_delta_rule

logger = logging.getLogger(__name__)

# field of the configuration -> (flag, value it must have)
_REQUIRED = {
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", True),
    "attention_output_gate": ("--attention-output-gate", True),
    "qk_layernorm": ("--qk-layernorm", True),
    "normalization": ("--normalization", "RMSNorm"),
    "deterministic_mode": ("--deterministic-mode", False),
}


class GatedDeltaNet(megatron_gated_delta_net.GatedDeltaNet):
    """Megatron's gated delta net as the published checkpoints compute it.

    Two things differ: the norm of its output is not zero-centred where all others are, and A_log counts in float32.
    """

    def __init__(self, config: TransformerConfig, submodules: Any, **kwargs: Any) -> None:
        norm = submodules.out_norm
        super().__init__(config, replace(submodules, out_norm=IdentityOp), **kwargs)
        plain = copy.copy(config)
        plain.layernorm_zero_centered_gamma = False
        self.out_norm = norm(config=plain, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon)

    def _compute_g_and_beta(
        self, a_log: torch.Tensor, dt_bias: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log decay and write strength. alpha, beta: [batch, tokens, heads]; a_log, dt_bias: [heads]."""
        return -a_log.float().exp() * F.softplus(alpha.float() + dt_bias), beta.sigmoid()


def hybrid_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one (virtual) pipeline stage; --linear-attention-freq says which hold a gated delta net.

    ValueError for a configuration that cannot compute these models' function.
    """
    _check(config)
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # Megatron would choose its own spec by it
    block = decoder_block_spec(plain, vp_stage)
    linear = get_linear_attention_pattern(config)
    numbers = _layer_numbers(config, vp_stage, len(block.layer_specs))
    if any(linear[number] for number in numbers):
        use_torch_kernels()
    layers = [
        _with_delta_net(config, layer) if linear[number] else layer
        for number, layer in zip(numbers, block.layer_specs, strict=True)
    ]
    return replace(block, layer_specs=layers)


def use_torch_kernels() -> bool:
    """Put the torch functions where Megatron 0.19 looks for flash-linear-attention's; True when they are in use.

    Does nothing (False) where flash-linear-attention is importable. Idempotent.
    """
    if common.causal_conv1d is None:
        logger.info("flash-linear-attention is not installed: gated delta nets run in plain torch")
    elif common.causal_conv1d is not gated_delta_rule.causal_conv1d:
        return False
    for name in ("causal_conv1d", "chunk_gated_delta_rule", "l2norm"):
        for module in (common, gdn):
            setattr(module, name, getattr(gated_delta_rule, name))
    common.HAVE_FLA = True
    return True


def _with_delta_net(config: TransformerConfig, layer: ModuleSpec) -> ModuleSpec:
    spec = replace(get_gated_delta_net_module_spec(config), module=GatedDeltaNet)
    return replace(layer, submodules=replace(layer.submodules, self_attention=spec, input_layernorm=IdentityOp))


def _layer_numbers(config: TransformerConfig, vp_stage: int | None, count: int) -> list[int]:
    """0-based numbers, over the whole model, of the layers of this stage."""
    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage)
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    return list(range(first, first + count))


def _check(config: TransformerConfig) -> None:
    for field, (flag, value) in _REQUIRED.items():
        found = getattr(config, field)
        if found != value:
            raise ValueError(f"{flag} gives {field} {found}; models with gated delta nets need {value}")
    if config.linear_attention_freq is None:
        raise ValueError("--linear-attention-freq is missing: 4 for attention in every fourth layer, or a 0/1 list")
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    for flag in ("linear_num_key_heads", "linear_num_value_heads"):
        heads = getattr(config, flag)
        if heads % (tp * cp):
            raise ValueError(
                f"--{flag.replace('_', '-')} {heads}: gated delta nets share their heads over tp {tp} x cp {cp} = "
                f"{tp * cp} ranks, which does not divide them"
            )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise ValueError(
            f"--linear-num-value-heads {config.linear_num_value_heads} must be a multiple of "
            f"--linear-num-key-heads {config.linear_num_key_heads}"
        )
    if tp > 1 and not config.sequence_parallel:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} without --sequence-parallel: Megatron would not add up the gradients "
            "of the delta nets' output norm, of whose heads every rank sees a part"
        )
