"""Rotary embeddings of MLA models with plain rope.

SGLang 0.5.17's `get_rope_cpu` asserts the type deepseek_yarn; every other type goes to the generic `get_rope`, which
computes with torch.
"""

import types
from typing import Any


def fix_factory(module: types.ModuleType) -> None:
    yarn_only = module.get_rope_cpu

    def get_rope_cpu(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        dtype: Any = None,
        partial_rotary_factor: float = 1.0,
        device: str | None = None,
    ) -> Any:
        args = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
        if rope_scaling is not None and rope_scaling.get("rope_type") == "deepseek_yarn":
            return yarn_only(*args, device)
        return module.get_rope(*args)

    module.get_rope_cpu = get_rope_cpu
