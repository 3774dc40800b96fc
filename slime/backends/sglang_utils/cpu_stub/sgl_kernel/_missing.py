"""Names and submodules of `sgl_kernel` that can be imported and looked into, but not called.

SGLang 0.5.17 imports kernels by name at module scope, also on the CPU, where it never calls them.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any


class Missing:
    """A kernel that is not there. Attribute chains (`scalar_types.uint4b8`) are read at import, so they work too."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is a GPU kernel; this server runs on the CPU, which has none")


def missing_names(module_name: str) -> Callable[[str], Missing]:
    """A module-level __getattr__ that answers every name."""

    def __getattr__(name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{module_name}.{name}")

    return __getattr__


def add_missing_submodules(package: str) -> None:
    """Makes every `package.x.y` importable, after the real files of the package have had their chance."""
    sys.meta_path.append(_SubmoduleFinder(package))


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = missing_names(spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass
