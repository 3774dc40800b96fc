"""Which kernels sparse attention runs on: Megatron's best for this device and model, or --dsa-kernel-backend's.

One decision, when a trainer parses its arguments; Megatron's layers read it from the configuration.
"""

import logging
from argparse import Namespace

from slime.backends.megatron_utils import flash_mla_from_sglang
from slime.utils.layout.sparse_kernels import FUSED, PLAIN, why_not

logger = logging.getLogger(__name__)
FLAG = "--dsa-kernel-backend"


def choose_kernels(megatron: Namespace, accelerator: str, asked: bool) -> str:
    """The value of Megatron's dsa_kernel_backend.

    asked: whether the user gave the flag; megatron.dsa_kernel_backend is used then. Raises ValueError when that cannot
    run here.
    """
    if asked:
        kernels = megatron.dsa_kernel_backend
        reason = None if kernels == PLAIN else _why_not_here(kernels, megatron, accelerator)
        if reason:
            raise ValueError(f"{FLAG} {kernels}: {reason}; leave it out to have the best that runs here")
        return kernels
    reasons = {kernels: _why_not_here(kernels, megatron, accelerator) for kernels in FUSED}
    kernels = next((kernels for kernels, reason in reasons.items() if reason is None), PLAIN)
    if kernels == PLAIN and accelerator != "cpu":
        because = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        logger.warning("sparse attention runs on plain torch, memory grows with tokens squared (%s)", because)
    return kernels


def missing_packages(kernels: str) -> list[str]:
    """What megatron-core's backend `kernels` imports and cannot. On a GPU only."""
    from megatron.core import utils

    if kernels == "cudnn":
        flash_mla_from_sglang.install()
    check = {
        "tilelang": utils._missing_tilelang_dsa_kernel_dependencies,
        "cudnn": utils._missing_cudnn_dsa_kernel_dependencies,
    }
    return check[kernels]()


def _why_not_here(kernels: str, megatron: Namespace, accelerator: str) -> str | None:
    if accelerator != "cuda":
        return f"its kernels need a GPU, and this is --accelerator {accelerator}"
    reason = why_not(kernels, megatron)
    if reason is None and (missing := missing_packages(kernels)):
        reason = f"not importable: {', '.join(missing)}"
    return reason
