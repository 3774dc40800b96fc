"""What the installed SGLang and sglang-router accept, read from their source text.

Importing `sglang.srt.server_args` takes seconds and, on the CPU, an adapted environment; parsing the file takes
milliseconds and needs neither. Knows nothing about values.
"""

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NO_DEFAULT = object()


@dataclass(frozen=True)
class UpstreamField:
    """One dataclass field. annotation: its type as written. default: NO_DEFAULT if there is none that is a literal."""

    name: str
    flag: str
    annotation: str
    default: Any
    has_flag: bool = True
    negatable: bool = False
    takes_json: bool = False


@functools.cache
def server_fields() -> dict[str, UpstreamField]:
    """Fields of sglang's ServerArgs by name."""
    return _dataclass_fields(_source("sglang", "srt/server_args.py"), "ServerArgs")


@functools.cache
def router_fields() -> dict[str, UpstreamField]:
    """Fields of sglang_router's RouterArgs by name."""
    return _dataclass_fields(_source("sglang_router", "router_args.py"), "RouterArgs")


def check_known(names: Iterable[str], known: Iterable[str], owner: str) -> None:
    """ValueError naming every unknown name and the nearest known ones."""
    known = list(known)
    unknown = sorted(set(names) - set(known))
    if unknown:
        nearest = {name: ", ".join(difflib.get_close_matches(name, known)) or "none" for name in unknown}
        hints = "; ".join(f"{name!r} (nearest: {near})" for name, near in nearest.items())
        raise ValueError(f"{owner} of the installed version has no field {hints}")


def _source(package: str, relative: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed; the rollout engines need it: pip install {package}")
    path = Path(spec.submodule_search_locations[0]) / relative
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; this version of {package} is laid out differently")
    return path


def _dataclass_fields(path: Path, class_name: str) -> dict[str, UpstreamField]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name), None)
    if body is None:
        raise ValueError(f"{path} defines no class {class_name}")
    fields = [_field(node) for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {field.name: field for field in fields}


def _field(node: ast.AnnAssign) -> UpstreamField:
    """Reads `name: Annotated[type, Arg(...)] = default`, or a plain annotation."""
    name = node.target.id
    annotation, options = node.annotation, {}
    if isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", None) in ("A", "Annotated"):
        parts = annotation.slice.elts
        annotation = parts[0]
        calls = [part for part in parts[1:] if isinstance(part, ast.Call) and getattr(part.func, "id", None) == "Arg"]
        options = {keyword.arg: keyword.value for call in calls for keyword in call.keywords}
    flag = ast.literal_eval(options["cli_name"]) if "cli_name" in options else "--" + name.replace("_", "-")
    parser = ast.unparse(options["type_parser"]) if "type_parser" in options else ""
    return UpstreamField(
        name=name,
        flag=flag,
        annotation=ast.unparse(annotation),
        default=_literal(node.value),
        has_flag="no_cli" not in options,
        negatable="BooleanOptionalAction" in ast.unparse(options["action"]) if "action" in options else False,
        takes_json="json" in parser,
    )


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return NO_DEFAULT
    try:
        return ast.literal_eval(node)
    except ValueError:  # a factory or a computed default
        return NO_DEFAULT
