"""One sparse-attention layer in this process alone, on the CPU or a GPU: for benchmarks and tests."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CHOOSING, REUSING = (
    3,
    4,
)  # layer numbers, counted from 1: with frequency 4 and offset 3 layer 4 reuses layer 3's tokens


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one layer, under config.json's names. The defaults are GLM-5.2's."""

    hidden_size: int = 6144
    heads: int = 64
    q_lora_rank: int = 2048
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192
    qk_rope_head_dim: int = 64
    v_head_dim: int = 256
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 2048


TINY = LayerSizes(48, 4, 28, 24, 16, 8, 20, 32, 20, 8)


def start_alone(accelerator: str) -> None:
    """Megatron's groups of a world of one, and plain modules in the places of Transformer Engine's where it lacks."""
    import torch.distributed as dist

    from slime.utils.accelerator import get_accelerator

    get_accelerator(accelerator).prepare_trainer()
    from slime.backends.megatron_utils import packed_rope, torch_te

    torch_te.install()
    packed_rope.install()
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def make_config(sizes: LayerSizes, dtype: Any, kernels: str, **changes: Any) -> Any:
    """Megatron's configuration of a model of 4 layers, of which the last reuses the third one's tokens."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    values = {
        "num_layers": 4,
        "hidden_size": sizes.hidden_size,
        "ffn_hidden_size": 2 * sizes.hidden_size,
        "num_attention_heads": sizes.heads,
        "multi_latent_attention": True,
        "q_lora_rank": sizes.q_lora_rank,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_head_dim": sizes.qk_nope_head_dim,
        "qk_pos_emb_head_dim": sizes.qk_rope_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "rope_type": "rope",
        "rotary_base": 1000000,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": sizes.index_n_heads,
        "dsa_indexer_head_dim": sizes.index_head_dim,
        "dsa_indexer_topk": sizes.index_topk,
        "dsa_indexer_topk_freq": 4,
        "dsa_indexer_skip_topk_offset": 3,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_kernel_backend": kernels,
    }
    return MLATransformerConfig(**(values | changes))


def build_attention(config: Any, layer_number: int) -> Any:
    """The self-attention of one layer with random weights, on the current device."""
    import torch
    from megatron.core.transformer.spec_utils import build_module

    from slime_plugins.models.glm5.glm5 import get_glm5_spec

    spec = get_glm5_spec(Namespace(), config, None).layer_specs[layer_number - 1].submodules.self_attention
    module = build_module(spec, config=config, layer_number=layer_number)
    generator = torch.Generator(device=next(module.parameters()).device).manual_seed(layer_number)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, parameter.size(-1) ** -0.5, generator=generator)
    return module


def packed(lengths: Sequence[int], device: Any) -> Any:
    """PackedSeqParams of whole sequences."""
    import torch

    from slime.backends.megatron_utils.data import packed_seq_params

    return packed_seq_params(list(lengths), torch.device(device))


def give_choice(params: Any, choice: Any) -> None:
    """Put the tokens [1, tokens, top-k] that layer CHOOSING would have chosen where layer REUSING looks for them."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    setattr(params, DSAttention._HOLDER_ATTR, {CHOOSING: choice})


def choice_of(params: Any) -> Any:
    """The tokens that layer CHOOSING has chosen, [1, tokens, top-k]."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    return getattr(params, DSAttention._HOLDER_ATTR)[CHOOSING]
