"""Forward FLOPs of a decoder-only transformer as a polynomial in the sequence length, for balancing and metrics.

Reads model dimensions under Megatron's argument names; imports neither torch nor megatron.
"""

from argparse import Namespace
from collections.abc import Iterable

from slime.utils.layout.moe_layers import moe_layer_pattern


def calculate_fwd_flops(seqlens: Iterable[int], args: Namespace) -> float:
    """Forward FLOPs (multiply and add count as 2) summed over sequences that attend causally, each to itself."""
    linear, quadratic = fwd_flops_coefficients(args)
    return float(sum(linear * s + quadratic * s * s for s in seqlens))


def fwd_flops_per_sample(seqlens: Iterable[int], args: Namespace) -> list[float]:
    """`calculate_fwd_flops` of every sequence on its own."""
    linear, quadratic = fwd_flops_coefficients(args)
    return [linear * s + quadratic * s * s for s in seqlens]


def fwd_flops_coefficients(args: Namespace) -> tuple[float, float]:
    """(a, b) such that one sequence of s tokens costs a s + b s^2 FLOPs.

    Matrix products only: projections, the causal half of Q K^T and P V, MLP (3 matrices with --swiglu, else 2),
    router, LM head. An unknown vocabulary (neither padded_vocab_size nor vocab_size) leaves the head out, which
    balancing can bear. Sparse and linear attention and multi-token prediction are not modelled.
    """
    projections, per_key = _mla_layer(args) if args.multi_latent_attention else _attention_layer(args)
    dense_layers, moe_layers = _layer_counts(args)
    vocab = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None) or 0
    linear = args.num_layers * projections + 2 * args.hidden_size * vocab
    if dense_layers:
        linear += dense_layers * _mlp(args, _dense_ffn_size(args))
    if moe_layers:
        linear += moe_layers * (_mlp(args, _active_moe_ffn_size(args)) + 2 * args.hidden_size * args.num_experts)
    # A causal token sees half of the sequence on average: 2 s^2 per multiply-add pair becomes s^2.
    return float(linear), float(args.num_layers * per_key)


def _attention_layer(args: Namespace) -> tuple[int, int]:
    """(projection FLOPs a token, score and value FLOPs a causal token pair) of a multi-head or grouped-query layer."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    head_dim = args.kv_channels or hidden // heads
    groups = args.num_query_groups if args.group_query_attention else heads
    query_and_output = 2 * (2 * hidden * heads * head_dim)
    key_and_value = 2 * (2 * hidden * groups * head_dim)
    return query_and_output + key_and_value, heads * (head_dim + head_dim)


def _mla_layer(args: Namespace) -> tuple[int, int]:
    """As `_attention_layer`, for multi-head latent attention with low-rank queries (or dense ones) and keys/values."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    nope, rope, value = args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim
    query_width = heads * (nope + rope)
    query = args.q_lora_rank * (hidden + query_width) if args.q_lora_rank else hidden * query_width
    key_value = args.kv_lora_rank * (hidden + heads * (nope + value)) + hidden * rope
    output = heads * value * hidden
    return 2 * (query + key_value + output), heads * (nope + rope + value)


def _mlp(args: Namespace, ffn_size: int) -> int:
    return 2 * args.hidden_size * ffn_size * (3 if args.swiglu else 2)


def _dense_ffn_size(args: Namespace) -> int:
    """--ffn-hidden-size or Megatron's default for it: 4 h, or two thirds of that in whole 64s for gated MLPs."""
    if args.ffn_hidden_size:
        return args.ffn_hidden_size
    return int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size


def _active_moe_ffn_size(args: Namespace) -> int:
    """Columns one token passes through: its top-k experts and the shared one."""
    expert = args.moe_ffn_hidden_size or _dense_ffn_size(args)
    return expert * args.moe_router_topk + (args.moe_shared_expert_intermediate_size or 0)


def _layer_counts(args: Namespace) -> tuple[int, int]:
    """(dense, MoE) layers."""
    if not args.num_experts:
        return args.num_layers, 0
    moe = sum(moe_layer_pattern(args.moe_layer_freq, args.num_layers))
    return args.num_layers - moe, moe
