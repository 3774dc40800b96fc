"""Build the GPT model of one (virtual) pipeline stage: Megatron's own layer specs, or the user's provider or spec."""

import inspect
import logging
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from torch import Tensor, nn

from slime.backends.megatron_utils.critic_head import attach_value_head, is_critic
from slime.backends.megatron_utils.layer_specs import decoder_block_spec
from slime.backends.megatron_utils.mtp import PredictingModel
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)

SPARSE_ATTENTION = "slime_plugins.models.glm5.glm5.get_glm5_spec"  # for --experimental-attention-variant dsa


def get_model_provider_func(
    args: Namespace, transformer_config: TransformerConfig | None = None
) -> Callable[..., Any]:
    """A function `(pre_process, post_process, vp_stage, config, pg_collection) -> model` for Megatron's `get_model`.

    `--custom-model-provider-path` (called with the keywords pre_process, post_process, and vp_stage if it takes it)
    wins over `--spec module name`, whose function gets `(args, config, vp_stage)` and returns a layer spec or such a
    provider. Parameters that `--freeze-params-name-list` / `--only-train-params-name-list` exclude, and without
    --enable-mtp-training those of multi-token-prediction layers, are frozen before DDP sees them.
    """

    def provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: Any = None,
    ) -> nn.Module:
        model = _build(args, config or transformer_config, pre_process, post_process, vp_stage)
        freeze_parameters(args, model)
        if hasattr(model, "mtp") and not args.enable_mtp_training:
            model.mtp.requires_grad_(False)
        if is_critic(args):
            attach_value_head(args, model, post_process)
        recompute_behind_frozen_embedding(model)
        return model

    return provider


def freeze_parameters(args: Namespace, model: nn.Module) -> None:
    """Apply the two name lists: regular expressions, searched in the parameter names of this pipeline stage.

    A decoder layer has its number in the whole model there, so that a list means the same in every layout.
    """
    only, freeze = args.only_train_params_name_list, args.freeze_params_name_list
    if not only and not freeze:
        return
    frozen = 0
    for local_name, param in model.named_parameters():
        name = _with_number_in_model(local_name, model)
        trained = any(re.search(p, name) for p in only) if only else not any(re.search(p, name) for p in freeze)
        param.requires_grad_(trained and param.requires_grad)  # the layers may have frozen it: an untrained indexer
        frozen += not param.requires_grad
    logger.info("froze %d of %d parameters of this pipeline stage", frozen, len(list(model.parameters())))


def require_something_trains(args: Namespace, model: Sequence[nn.Module]) -> None:
    """Raise ValueError where the two name lists leave nothing of what is to train. Collective over all ranks.

    model: this rank's chunks.
    """
    wanted = {"": "anything"}
    if args.enable_mtp_training:
        wanted["mtp."] = "the prediction layers (--enable-mtp-training)"
    if args.dsa_indexer_loss_coeff:
        wanted["indexer."] = "the indexers (--dsa-indexer-loss-coeff)"
    training = [name for chunk in model for name, param in chunk.named_parameters() if param.requires_grad]
    left = torch.tensor(
        [sum(part in name for name in training) for part in wanted], device=torch.cuda.current_device()
    )
    dist.all_reduce(left)
    lists = {
        "--only-train-params-name-list": args.only_train_params_name_list,
        "--freeze-params-name-list": args.freeze_params_name_list,
    }
    given = " ".join(f"{flag} {' '.join(patterns)}" for flag, patterns in lists.items() if patterns)
    for what, count in zip(wanted.values(), left.tolist(), strict=True):
        if not count and given:
            raise ValueError(
                f"{given}: leaves no parameter of {what} to train; the patterns are searched in names like "
                "decoder.layers.0.self_attention.linear_proj.weight"
            )


def _with_number_in_model(name: str, model: nn.Module) -> str:
    """decoder.layers.<i>.* with i counted from the model's first layer, not the stage's."""
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    number = found and getattr(model.decoder.layers[int(found[1])], "layer_number", None)
    return name if number is None else f"decoder.layers.{number - 1}.{name[found.end() :]}"


def recompute_behind_frozen_embedding(model: nn.Module) -> None:
    """Make the output of a frozen embedding ask for a gradient where layers are recomputed.

    Megatron's checkpointed layers get no backward pass at all unless their input asks for one: whatever trains in them
    would silently stay as it is. Pipeline stages without the embedding receive inputs that do.
    """
    embedding, config = getattr(model, "embedding", None), getattr(model, "config", None)
    if embedding is None or getattr(config, "recompute_granularity", None) is None:
        return
    if not any(param.requires_grad for param in embedding.parameters()):
        embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _build(
    args: Namespace, config: TransformerConfig | None, pre_process: bool, post_process: bool, vp_stage: int | None
) -> nn.Module:
    if args.custom_model_provider_path:
        custom = load_function(args.custom_model_provider_path)
        return _call_provider(custom, pre_process, post_process, vp_stage)

    config = config or core_transformer_config_from_args(args)
    if args.spec is not None:
        made = import_module(args.spec)
        spec = made(args, config, vp_stage) if callable(made) else made
        if callable(spec) and "pre_process" in inspect.signature(spec).parameters:
            return _call_provider(spec, pre_process, post_process, vp_stage)
    elif config.experimental_attention_variant == "dsa":
        spec = load_function(SPARSE_ATTENTION)(args, config, vp_stage)
    elif config.experimental_attention_variant is not None:
        spec = get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    else:
        spec = decoder_block_spec(config, vp_stage)

    return (PredictingModel if config.mtp_num_layers else GPTModel)(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=_prediction_layers(config, spec, vp_stage),
        vp_stage=vp_stage,
    )


def _prediction_layers(config: TransformerConfig, spec: Any, vp_stage: int | None) -> Any:
    """Multi-token-prediction layers like the decoder's last one; None without --mtp-num-layers or on another stage.

    A model that is told of them and has none would take half of its hidden states for their output.
    """
    if not config.mtp_num_layers:
        return None
    spec = getattr(spec, "prediction_layer", None) or spec
    return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True, vp_stage=vp_stage)


def _call_provider(
    provider: Callable[..., Any], pre_process: bool, post_process: bool, vp_stage: int | None
) -> nn.Module:
    kwargs: dict[str, Any] = {"pre_process": pre_process, "post_process": post_process}
    if "vp_stage" in inspect.signature(provider).parameters:
        kwargs["vp_stage"] = vp_stage
    return provider(**kwargs)
