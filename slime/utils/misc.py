"""Small helpers with no home of their own: plug-in loading, singletons, periodic actions, grouping."""

import hashlib
import importlib
import importlib.util
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@cache
def load_function(path: str) -> Any:
    """The object named by `package.module.name` or `path/to/file.py:name`; memoised per spelling.

    Raises ValueError for a malformed path, ImportError if the module cannot be found or fails to import (the cause
    is chained) or has no such name. Each message holds the path.
    """
    if ".py:" in path:
        file, _, name = path.rpartition(":")
        module = _load_file(path, Path(file))
    else:
        module_name, _, name = path.rpartition(".")
        if not module_name or not name:
            raise ValueError(f"cannot load {path!r}: give package.module.name or path/to/file.py:name")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ImportError(f"cannot load {path!r}: importing {module_name!r} failed: {_brief(error)}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = sorted(n for n in vars(module) if not n.startswith("_"))
        raise ImportError(
            f"cannot load {path!r}: {module.__name__!r} has no {name!r} (it has {', '.join(public[:20]) or 'nothing'})"
        ) from None


def _load_file(path: str, file: Path) -> Any:
    """Import a source file under a name derived from its absolute path, so that all names in it share one module."""
    file = file.expanduser().resolve()
    if not file.is_file():
        raise ImportError(f"cannot load {path!r}: no file {file}")
    module_name = f"slime_plugin_{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before execution: dataclasses and pickles in the file look it up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ImportError(f"cannot load {path!r}: executing {file} failed: {_brief(error)}") from error
    return module


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class SingletonMeta(type):
    """Metaclass: the first call of the class builds its one instance, later calls return it. Thread safe."""

    _instances: dict[type, Any] = {}
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    @staticmethod
    def clear_all_instances() -> None:
        """Forget every instance, so that the next call builds anew (tests, a second run in one process)."""
        with SingletonMeta._lock:
            SingletonMeta._instances.clear()


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Whether an action (save, eval) is due after rollout `rollout_id` (counted from 0).

    Never without an interval. Otherwise every `interval` rollouts, at the end of each epoch, and after the last of
    `num_rollout` rollouts if that is given.
    """
    if interval is None:
        return False
    if interval <= 0:
        raise ValueError(f"the interval of a periodic action must be positive, got {interval}; leave it out for never")
    done = rollout_id + 1
    if num_rollout is not None and done == num_rollout:
        return True
    return done % interval == 0 or (bool(num_rollout_per_epoch) and done % num_rollout_per_epoch == 0)


def group_by[T, K: Hashable](items: Iterable[T], key: Callable[[T], K] | None = None) -> dict[K, list[T]]:
    """Items by key (default: the item itself), keys and members in order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run `cmd` in bash; its standard output if captured. CalledProcessError (with stderr, if captured) on failure."""
    logger.info("exec: %s", cmd)
    result = subprocess.run(["bash", "-c", cmd], capture_output=capture_output, text=True, check=False)
    if result.returncode:
        logger.error("exit code %d of: %s\n%s", result.returncode, cmd, result.stderr or "")
        result.check_returncode()
    return result.stdout if capture_output else None
