"""Adam with Apex's state layout, which megatron-core's distributed optimizer saves, loads and reshards."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015), decoupled weight decay (Loshchilov & Hutter 2019) if adam_w_mode, else L2.

    Like torch.optim.AdamW, but the step count lives in the parameter group and the state of a parameter is exp_avg
    and exp_avg_sq alone, in the parameter's dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ):
        if capturable:
            raise ValueError("an optimizer step inside a CUDA graph needs transformer_engine or apex")
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update from the .grad of every parameter that has one. A closure is not supported."""
        if closure is not None:
            raise ValueError("FusedAdam.step takes no closure")
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if params:
                group["step"] = group.get("step", 0) + 1
                self._update(group, params, [p.grad for p in params])

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        mean = [self.state[p]["exp_avg"] for p in params]
        variance = [self.state[p]["exp_avg_sq"] for p in params]
        (beta1, beta2), lr, decay, step = group["betas"], group["lr"], group["weight_decay"], group["step"]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = torch._foreach_add(grads, params, alpha=decay)
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        torch._foreach_mul_(variance, beta2)
        torch._foreach_addcmul_(variance, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(variance)
        torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, mean, denominator, -lr / (1 - beta1**step))
