"""A checkpoint's config.json as Megatron's own objects: model facts -> Megatron's parser -> TransformerConfig."""

import argparse
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from mbridge.core.parallel_states import ParallelStates
from megatron.core.transformer import TransformerConfig

from slime.utils.model_facts import megatron_args, to_tokens

# Kernels that exist only on GPUs, or only with an extension: this configuration is right everywhere.
_PLAIN = {
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_permute_fusion": False,
    "apply_rope_fusion": False,
    "bias_dropout_fusion": False,
    "bias_swiglu_fusion": False,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Megatron's parser refuses what config.json says: {message}")


def parsed_facts(fields: Mapping[str, Any]) -> Namespace:
    """Megatron's namespace with the model arguments of config.json. ConfigError for a config without such facts."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(_Parser(prog="megatron", allow_abbrev=False))
    # flags of slime's own that are no business of Megatron's are left over
    return parser.parse_known_args(to_tokens(megatron_args(fields)))[0]


def transformer_config(
    parsed: Namespace, dtype: torch.dtype, grid: ParallelStates, overrides: Mapping[str, Any]
) -> TransformerConfig:
    """The configuration of a model on this grid. parsed: `parsed_facts`; overrides: further values, by field."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    values = {
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": grid.tp_size,
        "pipeline_model_parallel_size": grid.pp_size,
        "virtual_pipeline_model_parallel_size": grid.vpp_size,
        "context_parallel_size": grid.cp_size,
        "expert_model_parallel_size": grid.ep_size,
        "expert_tensor_parallel_size": grid.etp_size,
        "sequence_parallel": grid.tp_size > 1,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the all-gather dispatcher cannot take variable lengths
        "overlap_p2p_comm": grid.vpp_size is not None and grid.pp_size > 1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if parsed.multi_latent_attention:
        values["rope_type"] = "yarn"
        values["dsa_indexer_rotate_activation"] = False  # changes no score; needs bfloat16 and an extension
        if parsed.experimental_attention_variant == "dsa":
            values["cp_comm_type"] = ["all_gather"]  # sparse attention knows no other
        # latent attention has YaRN settings of its own, for which Megatron has no flags
        yarn = ("beta_fast", "beta_slow", "original_max_position_embeddings")
        values |= {name: getattr(parsed, f"yarn_{name}") for name in yarn if getattr(parsed, f"yarn_{name}")}
    return core_transformer_config_from_args(Namespace(**(vars(parsed) | _PLAIN | values | overrides)))
