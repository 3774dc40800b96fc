"""Bridges read from tables: what every model family shares between a Hugging Face directory and Megatron models.

A family's bridge is a subclass that names its table of rows; mbridge's own interface stays usable.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from mbridge.core import LLMBridge
from mbridge.core.util import unwrap_model
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import import_module
from transformers import PretrainedConfig

from slime.backends.megatron_utils.layer_specs import decoder_block_spec
from slime.backends.megatron_utils.megatron_to_hf.family import Family
from slime.backends.megatron_utils.megatron_to_hf.sharding import (
    is_expert,
    merge_shards,
    partition_dim,
    split_shards,
)
from slime.backends.megatron_utils.update_weight.common import agree, global_params
from slime.utils.model_facts.config import language_model
from slime_plugins.mbridge.config import parsed_facts, transformer_config
from slime_plugins.mbridge.weights import Weights

logger = logging.getLogger(__name__)

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
OUTPUT_BIAS = "output_layer.bias"


class BaseBridge(LLMBridge):
    """Fills Megatron model chunks from a checkpoint, by the rows of `family`.

    hf_config: transformers' object, or the content of config.json, which needs no class of its own in transformers.
    config: of the models to fill; without it one is made from the checkpoint's facts. hf_fields: what config.json says
    of the language model.
    """

    family: ClassVar[Family]
    weights_class: ClassVar[type[Weights]] = Weights

    def __init__(
        self,
        hf_config: PretrainedConfig | Mapping[str, Any],
        dtype: torch.dtype = torch.bfloat16,
        *,
        config: TransformerConfig | None = None,
        **kwargs: Any,
    ):
        is_object = isinstance(hf_config, PretrainedConfig)
        self._config_json = hf_config.to_dict() if is_object else dict(hf_config)
        self.hf_fields = dict(language_model(self._config_json, "config.json").fields)
        self._given_config = config
        self._parsed: Any = None
        hf_object = hf_config if is_object else PretrainedConfig.from_dict(self._config_json)
        super().__init__(hf_object, dtype=dtype, **kwargs)

    @torch.no_grad()
    def load_weights(
        self, models: Sequence[torch.nn.Module], weights_path: str | Path | Weights, memory_efficient: bool = True
    ) -> None:
        """Fill every parameter (and router expert bias) of the model chunks from a directory, or from opened weights.

        Each rank reads what it needs, one parameter at a time. Vocabulary rows beyond the checkpoint's are zeros, a
        value head (one output row) keeps its values. Collective: at the end all ranks together must have used every
        tensor of the checkpoint. Left-overs that the family knows, prediction layers among them when the models have
        none, are counted in the log; others raise ValueError with their names on all ranks. ValueError for a tensor
        that is missing or does not fit.
        """
        weights = self.weights_class(weights_path) if isinstance(weights_path, str | Path) else weights_path
        used: set[str] = agree(self._fill, models, weights)
        everywhere: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(everywhere, used)
        self._account(weights, weights.names - set().union(*everywhere), unwrap_model(models[0]).config)

    def shard(self, model: torch.nn.Module, name: str, param: torch.Tensor, weights: Weights) -> torch.Tensor:
        """This rank's shard of the global parameter `name`, read from `weights`, in the dtype of the files.

        model: the chunk that holds `param` (which may be on the meta device). ValueError when a tensor is missing or
        does not fit.
        """
        model = unwrap_model(model)
        hf_names = self.hf_names(model, name, weights)
        parts = [weights.read(hf_name) for hf_name in hf_names]
        size, rank = self._group(name)
        try:
            whole = self.family.restore(model.config, name, parts)
            if name in (EMBEDDING, OUTPUT):
                whole = _pad_rows(whole, param.size(0) * size)
            dim = partition_dim(name, param)
            if dim is not None:
                whole = split_shards(whole, dim, size, self.family.tp_blocks(model.config, name))[rank]
        except (RuntimeError, ValueError) as error:
            raise _misfit(weights, name, param, hf_names, parts) from error
        if whole.shape != param.shape:
            raise _misfit(weights, name, param, hf_names, parts)
        return whole

    def hf_names(self, model: torch.nn.Module, name: str, weights: Weights) -> list[str]:
        """The checkpoint's tensors that make up the global parameter `name`. model: an unwrapped chunk."""
        hf_names = self.family.hf_names(model.config, name)
        if name == OUTPUT:
            tied = self.hf_fields.get("tie_word_embeddings") and hf_names[0] not in weights
            if tied or model.share_embeddings_and_output_weights:
                return self.family.hf_names(model.config, EMBEDDING)
        return hf_names

    def _fill(self, models: Sequence[torch.nn.Module], weights: Weights) -> set[str]:
        """The tensors of the files that this rank used."""
        used: set[str] = set()
        for chunk in models:
            model = unwrap_model(chunk)
            _keep_routing_biases_exact(model)
            for _, name, param in global_params(chunk):
                if name == OUTPUT_BIAS:  # a value head's: no language model has one
                    continue
                used.update(part for hf_name in self.hf_names(model, name, weights) for part in weights.parts(hf_name))
                if name != OUTPUT or param.size(0) != 1:
                    param.copy_(self.shard(model, name, param, weights))
        return used

    def _group(self, name: str) -> tuple[int, int]:
        """(size, own rank) of the group that splits `name`."""
        if is_expert(name):
            return self.mpu.etp_size, self.mpu.etp_rank
        return self.mpu.tp_size, self.mpu.tp_rank

    def _account(self, weights: Weights, left: set[str], config: TransformerConfig) -> None:
        expected = {name for name in left if self.may_be_left(name, config)}
        unexpected = sorted(left - expected)
        if unexpected:
            raise ValueError(
                f"{len(unexpected)} tensors of {weights.path} have no place in the model: "
                f"{', '.join(unexpected[:5])}{', ...' if len(unexpected) > 5 else ''}; "
                "the model arguments do not describe this checkpoint"
            )
        if expected and dist.get_rank() == 0:
            logger.info(
                "%d of %d tensors of %s have no place in the model and were not read, e.g. %s",
                len(expected),
                len(weights.names),
                weights.path,
                min(expected),
            )

    def may_be_left(self, name: str, config: TransformerConfig) -> bool:
        """Whether the checkpoint's tensor `name` may have no place in a model of this configuration."""
        if any(re.fullmatch(pattern, name) for pattern in self.family.passed_over):
            return True
        if name in self.family.hf_names(config, OUTPUT):  # a copy of the embedding, when tied
            return bool(self.hf_fields.get("tie_word_embeddings"))
        if config.mtp_num_layers:
            return False
        layers, depths = self.hf_fields["num_hidden_layers"], self.hf_fields.get("num_nextn_predict_layers") or 0
        return any(name.startswith(self.family.mtp_prefixes(layers, depth)) for depth in range(depths))

    # mbridge's interface: its own loops over parameters ask these.

    def _build_config(self) -> TransformerConfig:
        if self._given_config is not None:
            return self._given_config
        return transformer_config(self._facts(), self.dtype, self.mpu, self.extra_args)

    def _facts(self) -> Any:
        if self._parsed is None:
            self._parsed = parsed_facts(self._config_json)
        return self._parsed

    @property
    def layer_spec(self) -> tuple[str, str] | None:
        """(module, function) of the layer spec of the checkpoint's family; None for Megatron's decoder block."""
        spec = self._facts().spec
        return None if spec is None else tuple(spec)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        if self.layer_spec is not None:
            return import_module(list(self.layer_spec))(self._facts(), self.config, vp_stage)
        return decoder_block_spec(self.config, vp_stage)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        facts = self._facts()
        return {
            "vocab_size": facts.vocab_size,
            "max_sequence_length": facts.max_position_embeddings or self.hf_fields["max_position_embeddings"],
            "position_embedding_type": "rope",
            "rotary_base": facts.rotary_base,
            "rotary_percent": facts.rotary_percent,
            "rope_scaling": facts.use_rope_scaling,
            "rope_scaling_factor": facts.rope_scaling_factor,
        }

    def get_model(self, weight_path: str | None = None, **kwargs: Any) -> list[GPTModel]:
        """The model chunks of this rank; with weight_path (a directory) they are filled. Not wrapped in DDP.

        kwargs: post_model_creation_callbacks of mbridge alone.
        """
        callbacks: Sequence[Callable] = kwargs.pop("post_model_creation_callbacks", ())
        if kwargs:
            raise ValueError(f"this bridge builds plain model chunks; it does not know {', '.join(kwargs)}")
        build = self._model_provider(list(callbacks))
        stages = range(self.mpu.vpp_size) if self.mpu.vpp_size else (None,)
        models = [
            build(
                mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
            )
            for stage in stages
        ]
        if weight_path:
            self.load_weights(models, weight_path)
        return models

    def _adjust_mapping_for_shared_weights(self) -> None:
        """Nothing to adjust: tied embeddings are known to the model."""

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        names = {local: name for local, name, _ in global_params(model)}
        if consider_ep:
            return names
        return {local: _with_expert_of(name, local) for local, name in names.items()}

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        tied = mcore_weights_name == OUTPUT and self.hf_fields.get("tie_word_embeddings")
        return self.family.hf_names(self.config, EMBEDDING if tied else mcore_weights_name)

    def _weight_to_hf_format(
        self, mcore_weights_name: str, mcore_weights: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        if mcore_weights_name in (EMBEDDING, OUTPUT):
            mcore_weights = mcore_weights[: self.hf_fields["vocab_size"]]
        pairs = self.family.convert(self.config, mcore_weights_name, mcore_weights)
        return self._weight_name_mapping_mcore_to_hf(mcore_weights_name), [tensor for _, tensor in pairs]

    def _weight_to_mcore_format(self, mcore_weights_name: str, hf_weights: list[torch.Tensor]) -> torch.Tensor:
        return self.family.restore(self.config, mcore_weights_name, hf_weights)

    def _weight_merge_across_tp(
        self, mcore_weights_name: str, mcore_weights: list[torch.Tensor], param: torch.Tensor
    ) -> torch.Tensor:
        dim = partition_dim(mcore_weights_name, param)
        if dim is None or len(mcore_weights) == 1:
            return mcore_weights[0]
        # mbridge gathers experts over the dense group when they have no group of their own
        shards = mcore_weights[: self._group(mcore_weights_name)[0]]
        return merge_shards(shards, dim, self.family.tp_blocks(self.config, mcore_weights_name))


def _keep_routing_biases_exact(model: torch.nn.Module) -> None:
    """Routing biases in float32. A half-precision wrapper has cast them, and Megatron casts them back at their first
    use: what was loaded before that would be rounded, and other experts chosen than by the engines."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()


def _with_expert_of(name: str, local: str) -> str:
    """The global name, with the number that the expert has on its own rank."""
    expert = re.compile(r"(.+\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")
    match, own = expert.fullmatch(name), expert.fullmatch(local)
    return name if match is None else match[1] + own[2]


def _misfit(
    weights: Weights, name: str, target: torch.Tensor, hf_names: Sequence[str], parts: Sequence[torch.Tensor]
) -> ValueError:
    found = ", ".join(f"{hf_name} {tuple(part.shape)}" for hf_name, part in zip(hf_names, parts, strict=True))
    return ValueError(
        f"{name} has shape {tuple(target.shape)} on this rank, which {found} of {weights.path} cannot give: "
        "the model arguments do not describe this checkpoint"
    )


def _pad_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """weight: [vocabulary, hidden] -> [rows, hidden], zeros below."""
    if weight.size(0) >= rows:
        return weight
    return torch.cat((weight, weight.new_zeros(rows - weight.size(0), weight.size(1))))
