"""What transformers says of a tiny model with sparse attention: logits and gradients, by its own attention."""

from pathlib import Path
from typing import Any

# Rows of 64 tokens, one sequence or ragged ones, most longer than index_topk 8; lengths are multiples of 2 * cp.
ROWS = ((20, 28, 16), (4, 44, 8, 8), (64,), (36, 4, 24))
TOKENS = sum(ROWS[0])


def rows(vocab_size: int) -> list[tuple[int, Any, Any, tuple[int, ...]]]:
    """(number, tokens [64], labels [64], lengths) of each packed row, the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(11)
    made = []
    for number, lengths in enumerate(ROWS):
        # not the padding token 2, whose embedding transformers gives no gradient
        tokens, labels = torch.randint(3, vocab_size, (2, TOKENS), generator=generator)
        made.append((number, tokens, labels, lengths))
    return made


def reference_model(path: str | Path) -> Any:
    """The model of a checkpoint in float32, rotated and normalised as its config.json and its engine say.

    transformers 5.12 always rotates halves in the indexer and leaves 1e-6 in the norms of compressed queries and keys.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = model.config.rms_norm_eps
    if getattr(model.config, "indexer_rope_interleave", False):
        modeling_glm_moe_dsa.apply_rotary_pos_emb = _rotate_neighbours
    return model


def _rotate_neighbours(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """Pairs (0, 1), (2, 3), ... as complex numbers, times e^(i angle). cos, sin: [..., n], halves repeated."""
    import torch

    half = cos.size(-1) // 2
    turn = torch.complex(cos[..., :half], sin[..., :half]).unsqueeze(unsqueeze_dim)

    def rotated(x: Any) -> Any:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)

    return rotated(q), rotated(k)


def write_indexer_reference(path: Path, target: Path) -> None:
    """target/indexers.pt: {"kl": mean KL of an indexer, "gradients": of the sum over indexers of their mean KL}.

    KL(p || q) of one query token: p the attention of the layer over its chosen tokens, summed over heads and divided
    by its sum; q the softmax of the indexer's scores over the same tokens. Means are over all query tokens. In
    float64, of what goes into each indexer of transformers' model.
    """
    import torch

    model = reference_model(path)
    seen: list[tuple[Any, Any, Any, Any]] = []
    inputs: dict[Any, tuple[Any, ...]] = {}
    for layer in model.model.layers:
        attention = layer.self_attn
        if attention.indexer is not None:
            attention.indexer.register_forward_hook(lambda module, got, out: inputs.update({module: got}))
            attention.register_forward_hook(
                lambda module, got, out: seen.append((module.indexer, inputs[module.indexer], out[1]))
            )
    with torch.no_grad():
        for _, tokens, _, lengths in rows(model.config.vocab_size):
            for part in tokens.split(list(lengths)):
                model(part[None])
    total, count = 0.0, len(ROWS) * TOKENS
    for indexer, (hidden, compressed, (cos, sin), *_), weights in seen:
        target_shares = weights[0].double().sum(0)
        target_shares = target_shares / target_shares.sum(-1, keepdim=True)
        values = (value[0].double() for value in (hidden, compressed, cos, sin))
        scores = _scores(indexer.double(), *values)
        for t in range(len(scores)):
            chosen = target_shares[t].nonzero()[:, 0]
            p, log_q = target_shares[t, chosen], scores[t, chosen].log_softmax(-1)
            total = total + (p * (p.log() - log_q)).sum() / count
    total.backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if ".indexer." in name}
    indexers = sum(layer.self_attn.indexer is not None for layer in model.model.layers)
    torch.save({"kl": float(total.detach()) / indexers, "gradients": gradients}, target / "indexers.pt")


def _scores(indexer: Any, hidden: Any, compressed: Any, cos: Any, sin: Any) -> Any:
    """[tokens, tokens]: sum_h w_h relu(q_h k) / sqrt(heads * head_dim), with gradients of the indexer's weights."""
    import torch

    heads, dim, turned = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
    q = indexer.wq_b(compressed).unflatten(-1, (heads, dim))
    k = indexer.k_norm(indexer.wk(hidden))
    q_turned, k_turned = _rotate_neighbours(q[..., :turned], k[:, None, :turned], cos, sin, unsqueeze_dim=1)
    q, k = torch.cat([q_turned, q[..., turned:]], -1), torch.cat([k_turned[:, 0], k[:, turned:]], -1)
    w = indexer.weights_proj(hidden)
    return torch.einsum("th,thj->tj", w, torch.relu(torch.einsum("thd,jd->thj", q, k))) * (heads * dim) ** -0.5


def write_reference(path: Path, target: Path) -> None:
    """target/logits.pt: [64, vocabulary] of each row; target/gradients: a checkpoint that holds gradients.

    Of the mean over rows of the mean cross entropy of their tokens. The indexer has none.
    """
    import torch

    model = reference_model(path)
    logits, loss = [], 0.0
    for _, tokens, labels, lengths in rows(model.config.vocab_size):
        row = torch.cat([model(part[None]).logits[0] for part in tokens.split(list(lengths))])
        logits.append(row.detach())
        loss = loss + torch.nn.functional.cross_entropy(row, labels) / len(ROWS)
    loss.backward()
    target.mkdir(parents=True)
    torch.save(logits, target / "logits.pt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(target / "gradients")
