"""Runs a function on a module right after that module was executed, before anybody uses it."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


def run_after_import(fixes: Mapping[str, Callable[[types.ModuleType], None]]) -> None:
    """fixes: full module name -> function that changes the module in place. A module already imported is an error."""
    too_late = sorted(fixes.keys() & sys.modules.keys())
    if too_late:
        raise ImportError(f"sgl_kernel must be imported before {', '.join(too_late)}, which it adapts to the CPU")
    sys.meta_path.insert(0, _Hook(dict(fixes)))


class _Hook(importlib.abc.MetaPathFinder):
    def __init__(self, fixes: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self._fixes = fixes

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        fix = self._fixes.get(fullname)
        if fix is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def execute_and_fix(module: types.ModuleType) -> None:
            execute(module)
            fix(module)

        spec.loader.exec_module = execute_and_fix
        return spec
