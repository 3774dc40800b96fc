"""Ragged random micro-batches and ten-line float64 versions of the formulas, for the loss tests."""

import sys
from argparse import Namespace
from typing import Any

import torch

VOCAB = 24

_DEFAULTS = {
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "log_probs_chunk_size": -1,
    "entropy_coef": 0.0,
    "experimental_attention_variant": None,
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "use_rollout_logprobs": False,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "get_mismatch_metrics": False,
    "custom_tis_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "custom_advantage_function_path": None,
    "custom_loss_function_path": None,
    "use_kl_loss": False,
    "kl_loss_type": "k1",
    "kl_loss_coef": 0.0,
    "use_unbiased_kl": False,
    "kl_coef": 0.0,
    "gamma": 1.0,
    "lambd": 1.0,
    "use_opd": False,
    "opd_kl_coef": 1.0,
    "normalize_advantages": False,
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "loss_type": "policy_loss",
    "value_clip": 0.2,
}


def make_args(**overrides: Any) -> Namespace:
    """The flags the losses read, at their defaults unless overridden."""
    unknown = set(overrides) - set(_DEFAULTS)
    assert not unknown, unknown
    return Namespace(**{**_DEFAULTS, **overrides})


def make_samples(seed: int, count: int, vocab: int = VOCAB, zero_response: bool = False) -> list[dict[str, Any]]:
    """Samples of unequal lengths with whole-response tensors and logits [n, vocab]; sample 1 is fully masked."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        prompt = int(torch.randint(1, 7, (), generator=g))
        response = 0 if zero_response and i == 0 else int(torch.randint(1, 12, (), generator=g))
        n = prompt + response
        mask = (torch.rand(response, generator=g) < 0.7).int() if i != 1 else torch.zeros(response, dtype=torch.int32)
        logits = torch.randn(n, vocab, generator=g) * 2
        tokens = torch.randint(0, vocab, (n,), generator=g)
        now = logits[prompt - 1 : n - 1].log_softmax(-1).gather(1, tokens[prompt:, None]).squeeze(1)
        noise = lambda scale, r=response: torch.randn(r, generator=g) * scale  # noqa: E731
        samples.append(
            {
                "tokens": tokens,
                "logits": logits,
                "total_lengths": n,
                "response_lengths": response,
                "loss_masks": mask,
                "rollout_mask_sums": mask.sum().float() + i % 3,
                "sample_indices": 100 + i,
                "log_probs": now + noise(0.3),
                "rollout_log_probs": now + noise(0.4),
                "ref_log_probs": now + noise(0.5),
                "advantages": noise(1.0),
                "values": noise(1.0),
                "returns": noise(1.0),
            }
        )
    return samples


def make_batch(samples: list[dict[str, Any]]) -> tuple[dict[str, Any], torch.Tensor]:
    """One packed micro-batch of a single process, and its logits [1, T + 3, vocab] (three rows of padding), a leaf."""
    batch = {key: [s[key] for s in samples] for key in samples[0] if key not in ("tokens", "logits")}
    batch["unconcat_tokens"] = [s["tokens"] for s in samples]
    logits = torch.cat([s["logits"] for s in samples] + [torch.randn(3, samples[0]["logits"].size(1))])
    return batch, logits.unsqueeze(0).requires_grad_()


def reference_log_probs(
    samples: list[dict[str, Any]], temperature: float = 1.0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per sample (log-probabilities, entropies) of the response, float64, differentiable through s["logits64"]."""
    out = []
    for s in samples:
        s["logits64"] = s["logits"].detach().double().requires_grad_()
        p = s["total_lengths"] - s["response_lengths"]
        log_p = (s["logits64"][p - 1 : -1] / temperature).log_softmax(-1)
        out.append((log_p.gather(1, s["tokens"][p:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)))
    return out


def reference_grad(samples: list[dict[str, Any]]) -> torch.Tensor:
    """Gradients of the float64 logits, packed as in `make_batch`."""
    grads = [torch.zeros_like(s["logits64"]) if s["logits64"].grad is None else s["logits64"].grad for s in samples]
    return torch.cat([*grads, grads[0].new_zeros(3, grads[0].size(1))]).unsqueeze(0)


def install_parallel_state(**sizes: Any) -> None:
    """Make the losses see these groups and sizes, where Megatron's would be; for processes without Megatron."""
    tp, cp, dp_cp = (sizes.get(k, (0, 1, None)) for k in ("tp", "cp", "dp_cp"))
    sys.modules["megatron.core.parallel_state"] = Namespace(
        is_initialized=lambda: True,
        get_tensor_model_parallel_rank=lambda: tp[0],
        get_tensor_model_parallel_world_size=lambda: tp[1],
        get_tensor_model_parallel_group=lambda: tp[2],
        get_context_parallel_rank=lambda: cp[0],
        get_context_parallel_world_size=lambda: cp[1],
        get_context_parallel_group=lambda: cp[2],
        get_data_parallel_world_size=lambda with_context_parallel: dp_cp[1],
        get_data_parallel_group=lambda with_context_parallel: dp_cp[2],
        is_pipeline_last_stage=lambda ignore_virtual: True,
    )
