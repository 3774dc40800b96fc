"""Calls into CUDA that SGLang 0.5.17 makes on every device.

`state_capturer.base` (routed experts) allocates pinned host memory; `weight_checker` (checksums) synchronizes the
device. Both raise without a driver, and on the CPU neither is needed: they get a `torch` without these two.
"""

import types
from typing import Any


def fix_torch(module: types.ModuleType) -> None:
    module.torch = _CpuTorch(module.torch)


class _CpuTorch(types.ModuleType):
    cuda = types.SimpleNamespace(synchronize=lambda *args: None, is_available=lambda: False)

    def __init__(self, torch: types.ModuleType) -> None:
        super().__init__("torch")
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return self._torch.zeros(*args, **kwargs)
