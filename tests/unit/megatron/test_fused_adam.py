"""FusedAdam takes the steps of torch's Adam and AdamW, and keeps its step count in the group."""

import pytest
import torch

from slime.backends.megatron_utils.torch_te.fused_adam import FusedAdam


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_equal_torch(adam_w_mode, decay):
    """Five steps in float64; the learning rate changes on the way, one parameter never gets a gradient."""
    torch.manual_seed(0)
    start = [torch.randn(5, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64), torch.randn(2)]
    mine, theirs = ([t.clone().requires_grad_() for t in start] for _ in range(2))
    options = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": decay}
    optimizer = FusedAdam(mine, adam_w_mode=adam_w_mode, **options)
    reference = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(theirs, **options)
    for step in range(5):
        for a, b in zip(mine[:2], theirs[:2], strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for one in (optimizer, reference):
            one.param_groups[0]["lr"] = 0.1 / (step + 1)
            one.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=0)
    assert optimizer.param_groups[0]["step"] == 5
    assert set(optimizer.state[mine[0]]) == {"exp_avg", "exp_avg_sq"}
    assert mine[2] not in optimizer.state or not optimizer.state[mine[2]]


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="CUDA graph"):
        FusedAdam([torch.zeros(1)], capturable=True)
