"""Makes a small GLM-5.2 with random weights, to try the whole loop on: sparse attention with shared indices, experts
with a routing bias, a word tokenizer, and prompts of more tokens than sparse attention chooses.

    python tools/make_glm5_tiny.py --out outputs/tiny                 # for a CPU: 0.7 M parameters, fp32
    python tools/make_glm5_tiny.py --out outputs/h200 --shape h200    # attention of the published size: 0.7 B, bf16

writes <out>/hf (Hugging Face checkpoint, with every key that engines read from the published config.json) and
<out>/prompts.jsonl.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = SPECIALS = ["<|pad|>", "<|end|>", "<|unknown|>"]
LAYERS, DENSE_LAYERS, FREQUENCY, OFFSET = 8, 3, 4, 3  # the published schedule: layers 0, 1, 2 and 6 choose tokens
BIAS_SCALE = 0.05  # of the routing bias


@dataclass(frozen=True)
class Shape:
    """What differs between the two models. prompt_tokens: shortest and longest prompt."""

    config: dict[str, Any]
    prompt_tokens: tuple[int, int]
    num_prompts: int


# No two sizes are equal that a mistake could mix up, and few are powers of two.
TINY = Shape(
    config={
        "dtype": "float32",
        "vocab_size": 250,
        "hidden_size": 72,
        "intermediate_size": 112,
        "num_attention_heads": 4,
        "q_lora_rank": 28,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "index_n_heads": 32,
        "index_head_dim": 20,
        "index_topk": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    prompt_tokens=(20, 60),
    num_prompts=512,
)
H200 = Shape(
    config={
        "dtype": "bfloat16",
        "vocab_size": 520,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_theta": 8000000.0, "rope_type": "default"},
    },
    prompt_tokens=(2150, 2250),
    num_prompts=1024,
)
SHAPES = {"tiny": TINY, "h200": H200}


def make_config(shape: Shape, mtp: bool = False) -> dict[str, Any]:
    """config.json. mtp: with one multi-token-prediction layer."""
    heads, head_dim = shape.config["num_attention_heads"], shape.config["qk_nope_head_dim"]
    return shape.config | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "qk_head_dim": head_dim + shape.config["qk_rope_head_dim"],
        "index_topk_freq": FREQUENCY,
        "index_skip_topk_offset": OFFSET,
        "index_topk_pattern": None,
        "indexer_types": ["full" if chooses_tokens(layer) else "shared" for layer in range(LAYERS)],
        "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
        "first_k_dense_replace": DENSE_LAYERS,
        "mlp_layer_types": ["dense"] * DENSE_LAYERS + ["sparse"] * (LAYERS - DENSE_LAYERS),
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": int(mtp),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "tie_word_embeddings": False,
        "pad_token_id": SPECIALS.index(PAD),
        "bos_token_id": None,
        "eos_token_id": SPECIALS.index(END),
        "ep_size": 1,
        "pretraining_tp": 1,
        "use_cache": True,
    }


def chooses_tokens(layer: int) -> bool:
    """Whether this layer (from 0) has an indexer; the others attend to what the layer before them chose."""
    return max(layer - OFFSET + 1, 0) % FREQUENCY == 0


def weight_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the checkpoint."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        predicts = layer >= config["num_hidden_layers"]
        if predicts:
            for part, shape in ("eh_proj", (hidden, 2 * hidden)), ("enorm", (hidden,)), ("hnorm", (hidden,)):
                yield f"{name}.{part}.weight", shape
            yield f"{name}.shared_head.norm.weight", (hidden,)
        yield from _attention(f"{name}.self_attn", config)
        if predicts or chooses_tokens(layer):
            yield from _indexer(f"{name}.self_attn.indexer", config)
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(f"{name}.mlp", hidden, config["intermediate_size"])
        else:
            yield from _experts(f"{name}.mlp", config)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _attention(name: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, latent, value = config["q_lora_rank"], config["kv_lora_rank"], config["v_head_dim"]
    yield f"{name}.q_a_proj.weight", (queries, hidden)
    yield f"{name}.q_a_layernorm.weight", (queries,)
    yield f"{name}.q_b_proj.weight", (heads * config["qk_head_dim"], queries)
    yield f"{name}.kv_a_proj_with_mqa.weight", (latent + config["qk_rope_head_dim"], hidden)
    yield f"{name}.kv_a_layernorm.weight", (latent,)
    yield f"{name}.kv_b_proj.weight", (heads * (config["qk_nope_head_dim"] + value), latent)
    yield f"{name}.o_proj.weight", (hidden, heads * value)


def _indexer(name: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, head_dim = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    yield f"{name}.wq_b.weight", (heads * head_dim, config["q_lora_rank"])
    yield f"{name}.wk.weight", (head_dim, hidden)
    yield f"{name}.k_norm.weight", (head_dim,)
    yield f"{name}.k_norm.bias", (head_dim,)
    yield f"{name}.weights_proj.weight", (heads, hidden)


def _experts(name: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, experts, inner = config["hidden_size"], config["n_routed_experts"], config["moe_intermediate_size"]
    yield f"{name}.gate.weight", (experts, hidden)
    yield f"{name}.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _mlp(f"{name}.experts.{expert}", hidden, inner)
    yield from _mlp(f"{name}.shared_experts", hidden, inner * config["n_shared_experts"])


def _mlp(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (inner, hidden)
    yield f"{name}.up_proj.weight", (inner, hidden)
    yield f"{name}.down_proj.weight", (hidden, inner)


def random_weights(config: dict[str, Any], seed: int) -> "dict[str, Tensor]":
    """Matrices ~ N(0, initializer_range^2), norms near 1 and biases near 0, in the config's dtype; the routing bias is
    float32 in every checkpoint."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    dtype, spread = getattr(torch, config["dtype"]), config["initializer_range"]
    weights = {}
    for name, shape in weight_shapes(config):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            weights[name] = BIAS_SCALE * noise
        elif name.endswith("norm.weight"):
            weights[name] = (1 + 0.1 * noise).to(dtype)
        else:
            weights[name] = noise.mul_(spread).to(dtype)
    return weights


def make_tokenizer(vocabulary: int) -> "PreTrainedTokenizerFast":
    """Words w3, w4, ... with these numbers as ids, between spaces, and three special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIALS, *(f"w{token}" for token in range(len(SPECIALS), vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def make_prompts(shape: Shape, seed: int) -> Iterator[dict[str, str]]:
    """Random words. The label is the token id at which the second half of the vocabulary starts."""
    draw, vocabulary = random.Random(seed), shape.config["vocab_size"]
    for _ in range(shape.num_prompts):
        length = draw.randint(*shape.prompt_tokens)
        words = (f"w{draw.randrange(len(SPECIALS), vocabulary)}" for _ in range(length))
        yield {"prompt": " ".join(words), "label": str(vocabulary // 2)}


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to; files there are replaced")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="which of the two models")
    parser.add_argument("--mtp", action="store_true", help="with a multi-token-prediction layer")
    parser.add_argument("--no-weights", action="store_true", help="everything but the weights, to plan a run")
    parser.add_argument("--seed", type=int, default=1234, help="of the weights and the prompts")
    args = parser.parse_args(argv)
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: is a file, must be a directory or a new name")
    shape, checkpoint = SHAPES[args.shape], args.out / "hf"
    config = make_config(shape, args.mtp)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_prompts(shape, args.seed)))
    if args.no_weights:
        return
    from safetensors.torch import save_file

    make_tokenizer(config["vocab_size"]).save_pretrained(checkpoint)
    weights = random_weights(config, args.seed)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    parameters = sum(weight.numel() for weight in weights.values())
    print(f"{checkpoint}: {args.shape} GLM-5.2, {parameters / 1e6:.1f} M parameters, {config['dtype']}")
    print(f"{args.out / 'prompts.jsonl'}: {shape.num_prompts} prompts of {shape.prompt_tokens} tokens")


if __name__ == "__main__":
    main()
