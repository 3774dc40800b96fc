"""Single functions of installed packages, taken from their source without importing the package around them."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def source_of(package: str, file: str) -> str:
    """The text of package/file.

    A package without an __init__.py may have several places, a folder of tests of the same name among them.
    """
    places = importlib.util.find_spec(package).submodule_search_locations
    return next(path for place in places if (path := Path(place) / file).is_file()).read_text()


def functions_of(package: str, file: str, names: list[str], **globals_: Any) -> SimpleNamespace:
    """The named top-level functions of package/file. globals_: what their bodies look up.

    Importing sglang.srt takes many seconds; a test that compares with three lines of it need not wait for that.
    """
    tree = ast.parse(source_of(package, file))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
    namespace = dict(globals_)
    exec(compile(ast.Module(found, []), file, "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})
