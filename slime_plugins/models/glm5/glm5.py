"""The layer spec of models with sparse latent attention, on Megatron's own modules (DSA).

Which layers choose tokens, and which reuse an earlier layer's choice, follows from the configuration.
"""

from argparse import Namespace
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
    get_transformer_layer_with_experimental_attention_variant_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slime.backends.megatron_utils import indexer_ties
from slime.utils.layout.index_sharing import (
    IndexSharing,
    index_sharing,
    index_sharing_of_config,
    legal_splits,
    shares_prediction_choice,
)
from slime.utils.model_facts import megatron_args
from slime.utils.model_facts.config import Config, language_model, load_config
from slime_plugins.models.glm5.attention import (
    Indexer,
    SparseAttention,
    set_indexer_loss_scale,
    with_float32_output,
)

_SIZES = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
_SAID_BY_CHECKPOINT = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_rope_interleaved")
SHOWN_SPLITS = 4


@dataclass
class SparseBlock(TransformerBlockSubmodules):
    """prediction_layer: the layer that multi-token prediction repeats. It has an indexer of its own."""

    prediction_layer: ModuleSpec | None = None


def get_glm5_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> SparseBlock:
    """The layers of one (virtual) pipeline stage.

    args.hf_checkpoint, where there is one, must describe the indexers that config does. Sets config's hook for the
    scale of the indexers' loss, and how Megatron breaks ties (`indexer_ties`). Raises ValueError for a configuration
    that is not this attention's, contradicts the checkpoint, or lets a stage begin with a layer that reuses the choice
    of a layer of another stage.
    """
    sharing = _require_consistent(config)
    indexer_ties.install(config.dsa_kernel_backend)
    if not config.calculate_per_token_loss:
        config.experimental_attention_variant_loss_scale_func = partial(
            set_indexer_loss_scale, config.context_parallel_size
        )
    checkpoint = _checkpoint(args)
    if checkpoint is not None:
        _require_what_the_checkpoint_says(config, sharing, checkpoint)
    try:
        block = get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    except RuntimeError as error:  # its only one: a stage that starts on a layer without an indexer
        raise ValueError(f"{error} {_legal_splits(config, sharing)}") from error
    layers = [_with_our_attention(layer) for layer in block.layer_specs]
    *_, last = get_transformer_layer_with_experimental_attention_variant_spec(config)
    values = {field.name: getattr(block, field.name) for field in fields(block)} | {"layer_specs": layers}
    chooses_once = checkpoint is not None and shares_prediction_choice(checkpoint.fields)
    prediction_layer = _with_our_attention(last, prediction_layer=True, chooses_once=chooses_once)
    return SparseBlock(**values, prediction_layer=prediction_layer)


def _with_our_attention(layer: ModuleSpec, **params: bool) -> ModuleSpec:
    """The layer with SparseAttention and Indexer in the places of Megatron's."""
    attention = layer.submodules.self_attention
    core = attention.submodules.core_attention
    indexer = core.submodules.indexer
    projection = with_float32_output(indexer.submodules.linear_weights_proj)
    indexer = replace(indexer, module=Indexer, submodules=replace(indexer.submodules, linear_weights_proj=projection))
    core = replace(
        core, module=SparseAttention, params=core.params | params, submodules=replace(core.submodules, indexer=indexer)
    )
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def _require_consistent(config: TransformerConfig) -> IndexSharing:
    """The schedule of computing layers, of a configuration whose other values are these models'."""
    if config.experimental_attention_variant != "dsa":
        raise ValueError(
            f"--experimental-attention-variant {config.experimental_attention_variant}: this layer spec is for dsa"
        )
    for name in _SIZES:
        if not getattr(config, name):
            raise ValueError(f"{_flag(name)} {getattr(config, name)}: must be >= 1, as config.json says")
    if config.dsa_indexer_k_norm_epsilon is None:
        raise ValueError(
            f"--dsa-indexer-k-norm-epsilon is not given, and Megatron would take --norm-epsilon "
            f"{config.layernorm_epsilon:g}; these models have --dsa-indexer-k-norm-epsilon 1e-6"
        )
    if config.dsa_indexer_rotate_activation:
        raise ValueError(
            "dsa_indexer_rotate_activation is on: the rotation changes no score, since it turns queries and keys "
            "alike, and needs an extension; pass --no-dsa-indexer-rotate-activation"
        )
    if not config.dsa_indexer_scoring_relu:
        raise ValueError("--no-dsa-indexer-scoring-relu: these models' scores are sum_h w_h relu(q_h k); leave it out")
    if (config.mtp_num_layers or 0) > 1 and not config.mtp_use_repeated_layer:
        raise ValueError(
            f"--mtp-num-layers {config.mtp_num_layers}: these models have one prediction layer; run it several times "
            "with --mtp-use-repeated-layer, or use --mtp-num-layers 1"
        )
    sharing = index_sharing(config)
    assert sharing is not None  # dsa
    return sharing


def _checkpoint(args: Namespace) -> Config | None:
    """The language model of args.hf_checkpoint's config.json, if there is such a file."""
    path = getattr(args, "hf_checkpoint", None)
    if path is None or not (Path(path) / "config.json").is_file():
        return None
    return language_model(*load_config(Path(path)))


def _require_what_the_checkpoint_says(config: TransformerConfig, sharing: IndexSharing, told: Config) -> None:
    """Compare with the checkpoint's config.json: its weights fit no other schedule, and no other rotation."""
    facts = megatron_args(told.fields, source=told.source)
    for name in _SAID_BY_CHECKPOINT:
        there, here = facts.get(_flag(name), False), getattr(config, name)
        if here != there:
            raise ValueError(f"{_flag(name)} {here}: {told.source} says {there}; leave the flag out")
    theirs = index_sharing_of_config(told.fields)
    if theirs is None or theirs == sharing:
        return
    if len(theirs.computes) != len(sharing.computes):
        raise ValueError(f"--num-layers {len(sharing.computes)}: {told.source} has {len(theirs.computes)} layers")
    layer = next(i for i, computes in enumerate(theirs.computes) if computes != sharing.computes[i])
    has = "has" if theirs.computes[layer] else "has no"
    raise ValueError(
        f"--dsa-indexer-topk-freq {config.dsa_indexer_topk_freq} --dsa-indexer-skip-topk-offset "
        f"{config.dsa_indexer_skip_topk_offset}: by {told.source} layer {layer} (counted from 0) {has} an "
        "indexer of its own, by the flags the opposite; leave the flags out"
    )


def _legal_splits(config: TransformerConfig, sharing: IndexSharing) -> str:
    size = config.pipeline_model_parallel_size
    splits = legal_splits(sharing, config.num_layers, size)[:SHOWN_SPLITS]
    if not splits:
        return f"No split of {config.num_layers} layers into {size} stages with equal middle ones is legal."
    shown = ", ".join(f"{first}/{last}" for first, last in splits)
    return f"Legal --decoder-first/last-pipeline-num-layers for {size} stages: {shown}."


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
