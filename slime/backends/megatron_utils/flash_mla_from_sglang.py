"""SGLang's sparse-attention kernel under the name that megatron-core 0.19's "cudnn" backend imports: flash_mla.

That package is not on the registry; sgl_kernel (0.4.5) holds the same kernel without one argument, which is 0 in all
of megatron-core's calls. Unnecessary where flash_mla is installed. GPU only.
"""

import functools
import importlib
import math
import sys
import types
from typing import Any

import torch
from torch import Tensor


def install() -> bool:
    """Make `import flash_mla` work; whether it does. Idempotent."""
    try:
        importlib.import_module("flash_mla")
    except ImportError:
        try:
            importlib.import_module("sgl_kernel.flash_mla")
        except ImportError:
            return False
        module = types.ModuleType("flash_mla", __doc__)
        module.flash_mla_sparse_fwd = flash_mla_sparse_fwd
        sys.modules["flash_mla"] = module
    return True


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, *, indexer_topk: int = 0, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(output [tokens, heads, 512], largest logits, natural log-sum-exp [tokens, heads] float32).

    q: [tokens, heads, 576] bfloat16; kv: [keys, 1, 576]; indices: [tokens, 1, top-k] int32, -1: none.
    Raises ValueError for indexer_topk, which this kernel does not know.
    """
    if indexer_topk:
        raise ValueError(f"indexer_topk {indexer_topk}: SGLang's kernel knows none; install flash_mla")
    kernel = importlib.import_module("sgl_kernel.flash_mla").flash_mla_sparse_fwd
    out, largest, lse = kernel(q, kv, indices, sm_scale, **options)
    return out, largest, lse * _to_natural(q.device)


@functools.cache
def _to_natural(device: torch.device) -> float:
    """What turns the kernel's log-sum-exp into a natural one: versions differ in its base.

    Two keys with logit 0 tell: log(2) is 1 in base 2.
    """
    kernel = importlib.import_module("sgl_kernel.flash_mla").flash_mla_sparse_fwd
    q = torch.zeros(64, 64, 576, dtype=torch.bfloat16, device=device)
    indices = torch.full((64, 1, 512), -1, dtype=torch.int32, device=device)
    indices[..., :2] = torch.arange(2, device=device, dtype=torch.int32)
    _, _, lse = kernel(q, q[:, :1].contiguous(), indices, 1.0)
    return math.log(2) / float(lse[0, 0])
