"""Finds what a dotted path names by reading source files: nothing is imported, so nothing of the user's runs."""

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAX_HOPS = 8  # re-exports that are followed before giving up

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Found:
    """definition: the function or class, None if only running the module would tell (`why`)."""

    definition: Definition | None
    why: str = ""


class NotFound(ValueError):
    """There is no such module (`names` is None), or it has no such name (`names`: those that it has)."""

    def __init__(self, says: str, names: tuple[str, ...] | None = None):
        super().__init__(says)
        self.names = names


def find(path: str) -> Found:
    """The definition of "package.module.name" or "path/to/file.py:name".

    Raises NotFound, and SyntaxError where the file is no Python.
    """
    if ".py:" in path:
        file, _, name = path.rpartition(":")
        file = Path(file).expanduser()
        if not os.path.isfile(file):
            raise NotFound(f"{file} does not exist")
        return _in_file(file, None, name, MAX_HOPS)
    module, _, name = path.rpartition(".")
    if not module or not name:
        raise NotFound("names no module")
    return _in_module(module, name, MAX_HOPS)


def module_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module would be imported from; None if nowhere. Its packages are not imported for it."""
    parts, locations, spec = module.split("."), None, None
    for depth in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:depth]), locations)
        if spec is None:
            return None
        locations = spec.submodule_search_locations
        if locations is None and depth < len(parts):
            return None
    return spec


def _spec(name: str, locations: Iterable[str] | None) -> importlib.machinery.ModuleSpec | None:
    places = None if locations is None else list(locations)
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        try:
            spec = find_spec(name, places) if find_spec else None
        except KeyError:  # a folder without __init__.py inside another package: Python wants the outer one imported
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            folders = [os.path.join(place, name.rpartition(".")[2]) for place in places or ()]
            spec.submodule_search_locations = [folder for folder in folders if os.path.isdir(folder)]
        if spec is not None:
            return spec
    return None


def _in_module(module: str, name: str, hops: int) -> Found:
    spec = module_spec(module)
    if spec is None:
        # the last part may be an attribute of a module that is none itself, such as os.path
        loaded = sys.modules.get(module)
        if loaded is not None:
            return Found(None, f"{module} is made while running")
        raise NotFound(f"No module named {_missing_part(module)!r}")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return Found(None, f"{module} has no source file")
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    return _in_file(Path(spec.origin), package, name, hops)


def _missing_part(module: str) -> str:
    """The shortest prefix that cannot be found, which Python's own error names too."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((prefix for prefix in prefixes if module_spec(prefix) is None), module)


def _in_file(file: Path, package: str | None, name: str, hops: int) -> Found:
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    found: Found | None = None
    names, dynamic = [], False
    for node in _top_level(tree.body):
        for bound, meaning in _bindings(node):
            names.append(bound)
            dynamic = dynamic or bound in ("*", "__getattr__")
            if bound == name:
                found = _resolve(node, meaning, package, hops)
    if found is not None:
        return found
    if dynamic:
        return Found(None, f"{file} makes names while running")
    raise NotFound(f"{file} has no {name!r}", tuple(bound for bound in names if not bound.startswith("_")))


def _resolve(node: ast.stmt, meaning: str, package: str | None, hops: int) -> Found:
    if isinstance(node, Definition):
        if isinstance(node, ast.ClassDef):
            return Found(node)
        return Found(node) if not node.decorator_list else Found(None, "it is decorated")
    if isinstance(node, ast.ImportFrom) and hops > 0:
        module = _absolute(node, package)
        if module is not None:
            return _in_module(module, meaning, hops - 1)
    return Found(None, "it is made while running")


def _absolute(node: ast.ImportFrom, package: str | None) -> str | None:
    if not node.level:
        return node.module
    if package is None:
        return None
    parts = package.split(".")
    base = parts[: len(parts) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base) if base else None


def _top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that bind module names, those inside top-level if, try and with included."""
    flat = []
    for node in body:
        flat.append(node)
        for part in ("body", "orelse", "finalbody") if isinstance(node, ast.If | ast.Try | ast.With) else ():
            flat += _top_level(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            flat += _top_level(handler.body)
    return flat


def _bindings(node: ast.stmt) -> list[tuple[str, str]]:
    """(name it binds, the name that stands for where it comes from)."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [(node.name, node.name)]
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        case ast.Assign():
            targets = [name for target in node.targets for name in ast.walk(target)]
        case ast.AnnAssign():
            targets = [node.target]
        case _:
            return []
    return [(name.id, name.id) for name in targets if isinstance(name, ast.Name)]
