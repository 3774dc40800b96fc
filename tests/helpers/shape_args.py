"""A namespace with the model flags that a ModelShape reads, at Megatron's defaults, without Megatron."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any


def shape_args(tokens: Sequence[str] = (), **changes: Any) -> Namespace:
    """tokens: Megatron flags and their values, as on a command line; `changes` win."""
    values = {
        "moe_latent_size": None,
        "experimental_attention_variant": None,
        "spec": None,
        "num_layers": None,
        "hidden_size": None,
        "ffn_hidden_size": None,
        "num_attention_heads": None,
        "num_query_groups": 1,
        "kv_channels": None,
        "group_query_attention": False,
        "multi_latent_attention": False,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "qk_layernorm": False,
        "add_qkv_bias": False,
        "add_bias_linear": True,
        "attention_output_gate": False,
        "normalization": "LayerNorm",
        "swiglu": False,
        "untie_embeddings_and_output_weights": False,
        "vocab_size": None,
        "padded_vocab_size": None,
        "make_vocab_size_divisible_by": 128,
        "position_embedding_type": "learned_absolute",
        "add_position_embedding": True,
        "max_position_embeddings": 64,
        "num_experts": None,
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "moe_router_enable_expert_bias": False,
        "mtp_num_layers": None,
        "mtp_use_repeated_layer": False,
        "linear_attention_freq": None,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "dsa_indexer_n_heads": None,
        "dsa_indexer_head_dim": None,
        "dsa_indexer_topk": None,
        "dsa_indexer_topk_freq": 1,
        "dsa_indexer_skip_topk_offset": 0,
        "hf_config": None,
    }
    for i, token in enumerate(tokens):
        if not token.startswith("--"):
            continue
        dest, follows = token[2:].replace("-", "_"), [*tokens, "--"][i + 1]
        if dest == "disable_bias_linear":
            values["add_bias_linear"] = False
        elif follows.startswith("--"):
            values[dest] = True
        else:
            values[dest] = int(follows) if follows.isdigit() else follows
    return Namespace(**values | changes)
