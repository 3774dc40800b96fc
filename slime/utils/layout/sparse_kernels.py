"""Which fused kernels of sparse attention fit a model: the sizes they are written for. Asks no machine."""

from argparse import Namespace

PLAIN = "none"
# In order of preference. tests/benchmarks/bench_dsa_layer.py compares them; on an H200 only tilelang has been timed.
FUSED = ("tilelang", "cudnn")

KEY_SIZE, VALUE_SIZE = 576, 512
SMALLEST_HEADS = 16
TOPK_MULTIPLE = 64


def why_not(kernels: str, a: Namespace) -> str | None:
    """Why megatron-core 0.19.2's backend `kernels` cannot run the model of Megatron's arguments; None if it can.

    Megatron itself would fall back to the plain path without a word, whose memory grows with the square of the tokens.
    """
    if kernels == PLAIN:
        return None
    if not a.bf16:
        return "its kernels are written for --bf16"
    if (a.kv_lora_rank, a.kv_lora_rank + a.qk_pos_emb_head_dim) != (VALUE_SIZE, KEY_SIZE):
        return (
            f"its kernels are written for --kv-lora-rank {VALUE_SIZE} and --qk-pos-emb-head-dim "
            f"{KEY_SIZE - VALUE_SIZE}, the model has {a.kv_lora_rank} and {a.qk_pos_emb_head_dim}"
        )
    heads = a.num_attention_heads // max(1, a.tensor_model_parallel_size)
    if kernels == "tilelang" and heads > SMALLEST_HEADS and heads & (heads - 1):
        return (
            f"its kernels are written for a power of two of heads a rank, here {a.num_attention_heads} / "
            f"{a.tensor_model_parallel_size} = {heads}"
        )
    if kernels == "cudnn" and heads % 64 and 64 % heads:
        return (
            f"its kernels are written for a divisor or multiple of 64 heads a rank, here {a.num_attention_heads} / "
            f"{a.tensor_model_parallel_size} = {heads}"
        )
    if a.dsa_indexer_topk % TOPK_MULTIPLE:
        return f"its kernels choose multiples of {TOPK_MULTIPLE} tokens, --dsa-indexer-topk is {a.dsa_indexer_topk}"
    return None
