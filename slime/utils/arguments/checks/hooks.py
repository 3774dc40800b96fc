"""Rules of plug-ins: what a path names exists and can be called as it will be, found without importing it."""

import ast
import builtins
import dataclasses
import difflib
from argparse import Namespace
from collections.abc import Generator, Iterator, Mapping

from slime.utils.arguments.checks.common import of_trainer
from slime.utils.arguments.checks.hook_calls import CALLS, DATA_SOURCE, DATA_SOURCE_METHODS, SPEC, Call
from slime.utils.arguments.checks.source import Found, NotFound, find
from slime.utils.arguments.flag import Problem

EXAMPLE = "package.module.name"
AWAITABLE = ("Awaitable", "Coroutine", "Future", "Task")


def check_hooks(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Each plug-in of the command line and of the evaluation's data sets."""
    for flag, where, path, call in _hooks(a, given):
        for problem in _check_path(flag, path, call):
            yield dataclasses.replace(problem, says=where + problem.says, try_="") if where else problem
    if "data_source_path" in given and a.data_source_path is not None:
        yield from _check_data_source(given["data_source_path"], a.data_source_path)


@of_trainer
def check_spec(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The provider of the model's layers, of the user or of the model's family, exists and takes its three values."""
    if not a.spec or a.custom_model_provider_path:
        return
    if len(a.spec) != 2:
        says = f"{' '.join(a.spec)}: takes the name of a module and of a function in it"
        yield Problem(("--spec",), says, "--spec package.module get_layer_spec")
        return
    for problem in _check_path("--spec", ".".join(a.spec), SPEC):
        ours = problem.kind == "absent" and a.spec[0].startswith("slime_plugins.")
        yield dataclasses.replace(problem, try_="", kind="unsupported" if ours else problem.kind)


def unchecked_hooks(a: Namespace, given: Mapping[str, str]) -> list[str]:
    """Sentences about plug-ins whose signature only running them would show."""
    sentences = []
    for flag, where, path, call in _hooks(a, given):
        try:
            found = find(path)
        except (NotFound, SyntaxError):
            continue  # a problem, reported as such
        if found.definition is None:
            sentences.append(f"{flag} {where}{path} is called as {call}, which could not be checked: {found.why}")
        elif call.kind == "awaited" and _may_return_awaitable(found.definition):
            sentences.append(
                f"{flag} {where}{path} is awaited, and is no `async def`: it must return something to await"
            )
    return sentences


def _hooks(a: Namespace, given: Mapping[str, str]) -> Iterator[tuple[str, str, str, Call]]:
    """(flag, where in its file, path, call) of each plug-in of the user's."""
    for dest, call in CALLS.items():
        if dest not in given:
            continue
        paths = getattr(a, dest)
        for path in paths if isinstance(paths, list) else [paths]:
            if path is not None:
                yield given[dest], "", path, call
    for data in a.eval_datasets if a.eval_config else ():
        for dest in ("custom_rm_path", "custom_generate_function_path"):
            path = getattr(data, dest)
            if path and not (dest in given and path == getattr(a, dest)):
                yield "--eval-config", f"{data.name}: {dest} ", path, CALLS[dest]


def _check_path(flag: str, path: str, call: Call) -> Iterator[Problem]:
    found = yield from _find(flag, path)
    if found is None or found.definition is None:
        return
    if isinstance(found.definition, ast.ClassDef):
        if call.kind == "awaited":
            yield Problem((flag,), f"{path} is a class; it is called as {call}, and the result is awaited")
        return
    yield from _check_call(flag, path, found.definition, call, drop_self=False)
    yield from _check_awaiting(flag, path, found.definition, call)


def _find(flag: str, path: str) -> Generator[Problem, None, Found | None]:
    """Returns what it found, or None after a problem."""
    try:
        return find(path)
    except NotFound as error:
        if error.names is None:
            yield Problem((flag,), f"{path}: {error}", f"{flag} {EXAMPLE}", kind="absent")
        else:
            name = path.replace(":", ".").rpartition(".")[2]
            near = difflib.get_close_matches(name, error.names, n=3, cutoff=0.5)
            has = f"; the nearest it has: {', '.join(near)}" if near else ""
            legal = f"{flag} {path[: len(path) - len(name)]}{near[0]}" if near else ""
            yield Problem((flag,), f"{path}: {error}{has}", legal)
    except SyntaxError as error:
        yield Problem((flag,), f"{path}: {error.filename}:{error.lineno}: {error.msg}")
    return None


def _check_call(
    flag: str, path: str, function: ast.FunctionDef | ast.AsyncFunctionDef, call: Call, drop_self: bool
) -> Iterator[Problem]:
    wrong = mismatch(function.args, call, drop_self)
    if wrong:
        says = f"{path}({ast.unparse(function.args)}) is called as {call}: {wrong}"
        optional = f"[, {', '.join(call.optional)}]" if call.optional else ""
        star = "*, " if not call.names else ""
        legal = f"def {function.name}({star}{', '.join([*call.names, *call.keywords])}{optional})"
        yield Problem((flag,), says, ("async " if call.kind == "awaited" else "") + legal)


def mismatch(declared: ast.arguments, call: Call, drop_self: bool = False) -> str:
    """Why a function with these parameters cannot take the call; "" when it can."""
    positional = [*declared.posonlyargs, *declared.args][1 if drop_self else 0 :]
    names = [parameter.arg for parameter in positional]
    keyword_only = {parameter.arg for parameter in declared.kwonlyargs}
    passed = len(call.names)
    if passed > len(names) and declared.vararg is None:
        return f"{passed} values by position, and it takes {len(names)}"
    only_by_position = {parameter.arg for parameter in declared.posonlyargs}
    for keyword in call.keywords:
        if keyword in names[:passed]:
            return f"{keyword} is passed twice, by position and by name"
        known = keyword in keyword_only or keyword in set(names) - only_by_position
        if not known and declared.kwarg is None:
            return f"it takes no {keyword}"
    given = set(names[:passed]) | set(call.keywords) | set(call.optional)
    defaulted = set(names[len(names) - min(len(declared.defaults), len(names)) :] if declared.defaults else ())
    defaulted |= {
        p.arg for p, value in zip(declared.kwonlyargs, declared.kw_defaults, strict=True) if value is not None
    }
    missing = [name for name in [*names, *(p.arg for p in declared.kwonlyargs)] if name not in given | defaulted]
    return f"nothing is passed for {', '.join(missing)}" if missing else ""


def _check_awaiting(
    flag: str, path: str, function: ast.FunctionDef | ast.AsyncFunctionDef, call: Call
) -> Iterator[Problem]:
    is_async = isinstance(function, ast.AsyncFunctionDef)
    if call.kind == "plain" and is_async:
        says = f"{path} is an `async def`, and its result is used without awaiting it"
        yield Problem((flag,), says, f"def {function.name}({ast.unparse(function.args)})")
    if call.kind == "awaited" and not is_async and not _may_return_awaitable(function):
        says = f"{path} is awaited, and is no `async def`"
        yield Problem((flag,), says, f"async def {function.name}({ast.unparse(function.args)})")


def _may_return_awaitable(function: ast.AST) -> bool:
    """Whether a plain function says that it returns something to await, or returns what another function gives it."""
    if not isinstance(function, ast.FunctionDef):
        return False
    if function.returns is not None and any(word in ast.unparse(function.returns) for word in AWAITABLE):
        return True
    if function.returns is not None:
        return False
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    called = [ast.unparse(value.func) for value in returned if isinstance(value, ast.Call)]
    return any(name not in dir(builtins) for name in called)


def _check_data_source(flag: str, path: str) -> Iterator[Problem]:
    """A class that is made with the arguments and has the methods of a data source."""
    found: Found | None = yield from _find(flag, path)
    if found is None or found.definition is None:
        return
    if not isinstance(found.definition, ast.ClassDef):
        return  # a function may make the object
    body = found.definition.body
    methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    inherits = any(ast.unparse(base) != "object" for base in found.definition.bases)
    if "__init__" in methods:
        yield from _check_call(flag, f"{path}.__init__", methods["__init__"], DATA_SOURCE, drop_self=True)
    for name, call in DATA_SOURCE_METHODS.items():
        if name in methods:
            static = any(ast.unparse(decorator) == "staticmethod" for decorator in methods[name].decorator_list)
            yield from _check_call(flag, f"{path}.{name}", methods[name], call, drop_self=not static)
            yield from _check_awaiting(flag, f"{path}.{name}", methods[name], call)
        elif not inherits:
            yield Problem((flag,), f"{path} has no method {name}", f"def {name}(self, {', '.join(call.names)})")


CHECKS = (check_hooks, check_spec)
