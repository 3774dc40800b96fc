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

# name -> (transformers config class, model class, config values)
TINY_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": HEAD_DIM, "tie_word_embeddings": False}),
    "qwen3_tied": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": HEAD_DIM, "tie_word_embeddings": True}),
    # Qwen2 and Llama configs may lack head_dim: hidden / heads
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": HEAD_DIM, "tie_word_embeddings": False}),
}


def make_tiny_model(name: str, directory: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the tiny model `name` (float32, random) to directory / name; return that path.

    overrides: config values, e.g. num_hidden_layers=2. Norm weights and biases are away from 1 and 0.
    """
    import torch
    import transformers

    if name not in TINY_MODELS:
        raise ValueError(f"unknown tiny model {name!r}: expected one of {', '.join(TINY_MODELS)}")
    config_class, model_class, values = TINY_MODELS[name]
    config = getattr(transformers, config_class)(**(_COMMON | values | overrides), dtype="float32")
    model = getattr(transformers, model_class)(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_((0.1 if parameter_name.endswith("bias") else 0.08) * noise)
    path = Path(directory) / name
    model.save_pretrained(path)
    return path


def megatron_flags(name: str, **overrides: Any) -> list[str]:
    """The Megatron command-line flags that describe the tiny model `name` (with the same config overrides)."""
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
