"""Per-token estimators of the KL divergence between two policies, on tokens that one of them drew."""

import torch
from torch import Tensor

_LOW_VAR_BOUND = 10.0


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || base) at every token, float32, same shape as log_probs.

    With d = log_probs - log_probs_base: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020, "Approximating KL
    divergence"), low_var_kl = k3 clamped to [-10, 10]. importance_ratio, policy over sampling policy, multiplies the
    estimate (before clamping), which makes its gradient unbiased when tokens were drawn from an older policy.
    """
    difference = log_probs.float() - log_probs_base.float()
    match kl_loss_type:
        case "k1":
            kl = difference
        case "k2":
            kl = difference.square() / 2
        case "k3" | "low_var_kl":
            kl = torch.expm1(-difference) + difference
        case _:
            raise ValueError(f"--kl-loss-type {kl_loss_type!r}: choose k1, k2, k3 or low_var_kl")
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl.clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND) if kl_loss_type == "low_var_kl" else kl
