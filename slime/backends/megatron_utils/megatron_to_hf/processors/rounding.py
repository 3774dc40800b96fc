"""Arithmetic that gives the same bits on every device."""

import torch


def quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """values / divisor, rounded once, in the dtype of `values`.

    On CUDA torch multiplies by the reciprocal of a Python number, which may differ in the last bit; not of a tensor.
    """
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)
