"""Tiny random Hugging Face checkpoints on disk. Their sizes are all different, so no missing transpose can hide."""

from pathlib import Path
from typing import Any

VOCAB = 250  # not a multiple of any padding
HIDDEN = 48
FFN = 112
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 20  # heads * head_dim = 80 != hidden
ROPE_THETA = 10000.0

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

_UNTIED = {"tie_word_embeddings": False}
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 28,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}

_PARTIAL_ROTARY = {
    "head_dim": HEAD_DIM,
    "partial_rotary_factor": 0.4,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA, "partial_rotary_factor": 0.4},
}
# three delta nets, then attention; 3 value heads a key head
_DELTA_NET = _PARTIAL_ROTARY | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}

# 32 heads as published: with few, many scores are exactly 0, and ties are broken in different ways.
_INDEXER = {
    "index_n_heads": 32,
    "index_head_dim": 20,
    "index_topk": 8,
    "head_dim": _LATENT["qk_rope_head_dim"],
}

# name -> (transformers config class, model class, config values)
TINY_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": HEAD_DIM, "tie_word_embeddings": False}),
    "qwen3_tied": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": HEAD_DIM, "tie_word_embeddings": True}),
    # Qwen2 and Llama configs may lack head_dim: hidden / heads
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": HEAD_DIM, "tie_word_embeddings": False}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _UNTIED | _QWEN_EXPERTS | {"head_dim": HEAD_DIM, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _UNTIED | _QWEN_EXPERTS | {"shared_expert_intermediate_size": 56, "norm_topk_prob": False},
    ),
    # 4 of 16 experts from the 2 best of 4 groups: each group counts by its 2 best, as in the published models
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _UNTIED
        | _LATENT
        | _EXPERTS
        | {
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": ROPE_THETA,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.9,
                "mscale_all_dim": 0.6,
            },
        },
    ),
    "deepseek_v3_plain_queries": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _UNTIED | _LATENT | _EXPERTS | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        _UNTIED
        | _EXPERTS
        | {
            "head_dim": HEAD_DIM,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        _UNTIED | _LATENT | _EXPERTS | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        _UNTIED
        | _LATENT
        | _EXPERTS
        | _INDEXER
        | {"n_routed_experts": 16, "num_experts": 16, "n_group": 4, "topk_group": 2},
    ),
    # Layer 3 reuses the tokens that layer 2 chose. transformers 5.12 rotates halves in the indexer whatever the config
    # says.
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        _UNTIED
        | _LATENT
        | _EXPERTS
        | _INDEXER
        | {"index_topk_freq": 4, "index_skip_topk_offset": 3, "indexer_rope_interleave": False},
    ),
    # GLM-5.2: layers 0, 1, 2 and 6 choose tokens, 3 to 5 and 7 reuse the choice before them
    "glm5_2": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        _UNTIED
        | _LATENT
        | _EXPERTS
        | _INDEXER
        | {
            "num_hidden_layers": 8,
            "rms_norm_eps": 1e-5,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
            "indexer_rope_interleave": True,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _UNTIED | _QWEN_EXPERTS | _DELTA_NET | {"shared_expert_intermediate_size": 56, "norm_topk_prob": True},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _DELTA_NET | {"tie_word_embeddings": True}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        _UNTIED | _QWEN_EXPERTS | _DELTA_NET | {"shared_expert_intermediate_size": 56},
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", _UNTIED | _PARTIAL_ROTARY | {"attention_bias": True}),
    "minimax_m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        _UNTIED | _PARTIAL_ROTARY | {"num_local_experts": 8, "num_experts_per_tok": 3},
    ),
}


def make_tiny_model(name: str, directory: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the tiny model `name` (float32, random) to directory / name; return that path.

    overrides: config values, e.g. num_hidden_layers=2. Norm weights and biases are away from 1 and 0.
    """
    import torch
    import transformers

    config = _config(name, overrides)
    model = getattr(transformers, TINY_MODELS[name][1])(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.1 * noise)
            elif "conv1d" in parameter_name:  # what it gives is divided by its length, which must not be near 0
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_((0.1 if parameter_name.endswith("bias") else 0.08) * noise)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    path = Path(directory) / name
    model.save_pretrained(path)
    return path


def _config(name: str, overrides: dict[str, Any]) -> Any:
    import transformers

    if name not in TINY_MODELS:
        raise ValueError(f"unknown tiny model {name!r}: expected one of {', '.join(TINY_MODELS)}")
    config_class, _, values = TINY_MODELS[name]
    return getattr(transformers, config_class)(**(_COMMON | values | overrides), dtype="float32")


def megatron_flags(name: str, **overrides: Any) -> list[str]:
    """The Megatron command-line flags that describe the tiny model `name` (with the same config overrides).

    Written out here for the dense models, by slime's model facts for the others.
    """
    if name not in ("qwen2", "qwen3", "qwen3_tied", "llama"):
        return _flags_by_facts(_config(name, overrides).to_dict())
    values = _COMMON | TINY_MODELS[name][2] | overrides
    head_dim = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])
    flags = {
        "--num-layers": values["num_hidden_layers"],
        "--hidden-size": values["hidden_size"],
        "--ffn-hidden-size": values["intermediate_size"],
        "--num-attention-heads": values["num_attention_heads"],
        "--num-query-groups": values["num_key_value_heads"],
        "--kv-channels": head_dim,
        "--norm-epsilon": values["rms_norm_eps"],
        "--rotary-base": int(values["rope_parameters"]["rope_theta"]),
        "--vocab-size": values["vocab_size"],
        "--max-position-embeddings": values["max_position_embeddings"],
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
    }
    switches = ["--group-query-attention", "--swiglu", "--disable-bias-linear"]
    if name.startswith("qwen3"):
        switches.append("--qk-layernorm")
    if name == "qwen2":
        switches.append("--add-qkv-bias")
    if not values["tie_word_embeddings"]:
        switches.append("--untie-embeddings-and-output-weights")
    return switches + [str(token) for pair in flags.items() for token in pair]


def _flags_by_facts(config: dict[str, Any]) -> list[str]:
    from slime.utils.model_facts import megatron_args, to_tokens

    ours = ("--allgather-cp", "--post-self-attn-layernorm", "--post-mlp-layernorm")  # unknown to Megatron's parser
    return to_tokens({flag: value for flag, value in megatron_args(config).items() if flag not in ours})
