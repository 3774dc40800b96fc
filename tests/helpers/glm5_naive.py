"""Sparse latent attention in float64 loops, straight from its definition: one query token at a time."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tests.helpers.glm5_layer import LayerSizes


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Any, position: int, base: float, neighbours: bool) -> Any:
    """x [..., n] turned by position * base^(-2i/n): pairs (2i, 2i + 1) if neighbours, else (i, i + n / 2)."""
    n = x.size(-1)
    angles = position * base ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
    cos, sin = angles.cos(), angles.sin()
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else x.split(n // 2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def index_scores(layer: Any, sizes: LayerSizes, x: Any, compressed: Any, neighbours: bool, base: float) -> Any:
    """[tokens, tokens] of one sequence: sum_h w_h relu(q_h k) / sqrt(heads * head_dim). layer: an Indexer."""
    weights = {name: tensor.detach().double() for name, tensor in layer.named_parameters()}
    heads, dim, turned = sizes.index_n_heads, sizes.index_head_dim, sizes.qk_rope_head_dim
    q = (compressed @ weights["linear_wq_b.weight"].t()).unflatten(-1, (heads, dim))
    k = F.layer_norm(
        x @ weights["linear_wk.weight"].t(), (dim,), weights["k_norm.weight"], weights["k_norm.bias"], 1e-6
    )
    w = x @ weights["linear_weights_proj.weight"].t()

    def at(v: Any, position: int) -> Any:
        return torch.cat([rotate(v[..., :turned], position, base, neighbours), v[..., turned:]], -1)

    scores = torch.zeros(len(x), len(x), dtype=torch.float64)
    for t in range(len(x)):
        for j in range(len(x)):
            scores[t, j] = (w[t] * F.relu(at(q[t], t) @ at(k[j], j))).sum()
    return scores * (heads * dim) ** -0.5


def attention(
    layer: Any, sizes: LayerSizes, row: Any, lengths: Sequence[int], *, neighbours: bool = True, choose: bool = True
) -> Any:
    """[tokens, hidden] of a packed row [tokens, hidden] float64. choose=False: each token attends to all before it."""
    base, eps = layer.config.rotary_base, layer.config.layernorm_epsilon
    weights = {name: tensor.detach().double() for name, tensor in layer.named_parameters()}
    plain, turned, value = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
    outs = []
    for x in row.split(list(lengths)):
        compressed = rms_norm(x @ weights["linear_q_down_proj.weight"].t(), weights["q_layernorm.weight"], eps)
        q = (compressed @ weights["linear_q_up_proj.weight"].t()).unflatten(-1, (sizes.heads, plain + turned))
        down = x @ weights["linear_kv_down_proj.weight"].t()
        latent = rms_norm(down[:, : sizes.kv_lora_rank], weights["kv_layernorm.weight"], eps)
        up = (latent @ weights["linear_kv_up_proj.weight"].t()).unflatten(-1, (sizes.heads, plain + value))
        if choose:
            scores = index_scores(layer.core_attention.indexer, sizes, x, compressed, neighbours, base)
        for t in range(len(x)):
            seen = torch.arange(t + 1)
            if choose:
                seen = scores[t, : t + 1].topk(min(sizes.index_topk, t + 1)).indices
            query = torch.cat([q[t, :, :plain], rotate(q[t, :, plain:], t, base, True)], -1)
            logits = []
            for j in seen.tolist():
                shared = rotate(down[j, sizes.kv_lora_rank :], j, base, True)
                key = torch.cat([up[j, :, :plain], shared.expand(sizes.heads, turned)], -1)
                logits.append((query * key).sum(-1) * (plain + turned) ** -0.5)
            shares = torch.stack(logits, -1).softmax(-1)
            mixed = torch.einsum("hj,jhd->hd", shares, up[seen, :, plain:])
            outs.append(mixed.flatten() @ weights["linear_proj.weight"].t())
    return torch.stack(outs)
