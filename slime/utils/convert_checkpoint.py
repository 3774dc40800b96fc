"""A Hugging Face directory turned into another, file by file: planned and checked first, resumable, appearing whole.

What becomes of a tensor is a rule given by the caller; this module knows files, workers and progress.
"""

import hashlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.filesize import decimal

from slime.utils import safetensors_io as io
from slime.utils.safetensors_io import CheckpointError, TensorInfo

logger = logging.getLogger(__name__)


class Rule(Protocol):
    """What becomes of each tensor of a checkpoint. Both methods may raise ValueError, naming the tensor."""

    def outputs(self, name: str) -> dict[str, TensorInfo]:
        """The tensors that `name` becomes; none when another tensor takes it in. Reads no data of any size."""

    def convert(self, name: str) -> Iterable[tuple[str, torch.Tensor]]:
        """Those tensors. Called from several threads."""


class Described(Protocol):
    """What a header tells of the tensors of one file."""

    infos: dict[str, TensorInfo]


class Source(Protocol):
    """Where tensors come from; a CheckpointDirectory is one. What it calls files become the files of the output."""

    path: Path

    @property
    def files(self) -> Mapping[str, Described]: ...

    def identity(self) -> Sequence[Any]:
        """Equal for two calls that would read the same; JSON can write it."""


@dataclass(frozen=True)
class Summary:
    """What a conversion did. tensors, bytes_read, bytes_written: of the whole checkpoint; files: converted now."""

    tensors: int
    files: int
    files_kept: int
    bytes_read: int
    bytes_written: int
    seconds: float
    complete: bool

    def __str__(self) -> str:
        kept = f" ({self.files_kept} were there already)" if self.files_kept else ""
        sizes = f"{decimal(self.bytes_read)} -> {decimal(self.bytes_written)}"
        return f"{self.tensors} tensors in {self.files} files{kept}, {sizes}, {self.seconds:.1f} s"


def convert_checkpoint(
    source: Source,
    target: Path,
    rule: Rule,
    config: Mapping[str, Any],
    *,
    settings: Mapping[str, Any],
    max_workers: int = 1,
    force: bool = False,
    only: Sequence[str] | None = None,
) -> Summary:
    """Write `source` as `target`: weights by the rule under the same file names, `config` as config.json, the rest
    copied.

    The work is done in `<target>.partial-<key>`; the same call after an interruption finds that directory, keeps its
    complete files and does the others. The key depends on the settings and the source's files, so that nothing made
    otherwise is taken over. `target` appears by a rename at the end; with force it may replace an older directory,
    which stays untouched until then. With `only`, these files alone are converted (several machines may share the
    work) and the call that finds all files there publishes them.

    Memory: about three times the largest tensor for each worker. CheckpointError for everything that is wrong with
    source, target, tensors or disk; the partial directory then stays for the next try.
    """
    io.check_target(source.path, target, force)
    plan = _plan(source, rule)
    chosen = _choose(plan, only)
    partial = io.partial_directory(target, _key(source, config, settings))
    for path in io.other_partials(target, _key(source, config, settings)):
        logger.warning("%s is the rest of another conversion; remove it if none is running", path)
    _make(partial)
    todo = [file for file in chosen if not io.is_complete(partial / file, _written(plan[file]))]
    _check_space(partial, plan, todo)
    started = time.monotonic()
    _convert_files(source, partial, rule, plan, todo, max_workers)
    complete = all(io.is_complete(partial / file, _written(outputs)) for file, outputs in plan.items())
    if complete:
        _finish(source.path, partial, target, plan, config)
    return Summary(
        tensors=sum(len(_written(outputs)) for outputs in plan.values()),
        files=len(todo),
        files_kept=len(chosen) - len(todo),
        bytes_read=sum(info.nbytes for file in source.files.values() for info in file.infos.values()),
        bytes_written=sum(_size(outputs) for outputs in plan.values()),
        seconds=time.monotonic() - started,
        complete=complete,
    )


def run_tool(convert: Callable[[], Summary]) -> None:
    """The main part of a tool: logs to stderr, one sentence instead of a stack trace for what users can mend."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        summary = convert()
    except CheckpointError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues where this one stopped")
    logger.info("%s", summary)
    if not summary.complete:
        logger.info("not all files are converted yet; the call that converts the last one publishes the directory")


# file -> tensor -> what it becomes; files that become empty are left out
_Plan = dict[str, dict[str, dict[str, TensorInfo]]]


def _plan(source: Source, rule: Rule) -> _Plan:
    plan: _Plan = {}
    where: dict[str, str] = {}
    for file, tensors in source.files.items():
        outputs = {name: _checked(rule.outputs, name) for name in tensors.infos}
        for name in _written_names(outputs):
            if name in where:
                raise CheckpointError(f"{name} would be written twice, from {where[name]} and from {file}")
            where[name] = file
        if any(outputs.values()):
            plan[file] = outputs
    return plan


def _checked(function: Callable[[str], Any], name: str) -> Any:
    try:
        return function(name)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _written_names(outputs: Mapping[str, Mapping[str, TensorInfo]]) -> Iterator[str]:
    for infos in outputs.values():
        yield from infos


def _written(outputs: Mapping[str, Mapping[str, TensorInfo]]) -> dict[str, TensorInfo]:
    return {name: info for infos in outputs.values() for name, info in infos.items()}


def _size(outputs: Mapping[str, Mapping[str, TensorInfo]]) -> int:
    return sum(info.nbytes for info in _written(outputs).values())


def _choose(plan: _Plan, only: Sequence[str] | None) -> list[str]:
    if only is None:
        return list(plan)
    unknown = [file for file in only if file not in plan]
    if unknown:
        raise CheckpointError(f"no weight file {unknown[0]}; there are {', '.join(plan)}")
    return list(only)


def _key(source: Source, config: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    everything = json.dumps([source.identity(), config, settings], sort_keys=True, default=str)
    return hashlib.sha256(everything.encode()).hexdigest()[:12]


def _make(partial: Path) -> None:
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {partial}: {error.strerror}") from error
    io.remove_temporaries(partial)


def _check_space(partial: Path, plan: _Plan, todo: Sequence[str]) -> None:
    needed = sum(_size(plan[file]) for file in todo)
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise CheckpointError(f"the output needs {decimal(needed)} more, {partial.parent} has {decimal(free)} free")


def _convert_files(
    source: Source, partial: Path, rule: Rule, plan: _Plan, todo: Sequence[str], max_workers: int
) -> None:
    """In order of size, the largest first, so that the workers end together. The first error stops all."""
    order = sorted(todo, key=lambda file: -_size(plan[file]))
    workers = max(1, min(max_workers, len(order)))
    with (
        _progress(sum(_size(plan[file]) for file in todo), len(todo)) as advance,
        # the pieces are small: threads of torch's own would wait for each other more than they compute
        ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        futures = {pool.submit(_convert_file, partial / file, rule, plan[file], advance): file for file in order}
        try:
            for future in as_completed(futures):
                future.result()
                advance(0, futures[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _convert_file(
    path: Path, rule: Rule, outputs: Mapping[str, Mapping[str, TensorInfo]], advance: Callable[[int], None]
) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in outputs:
            yield from _converted(rule, name)
            advance(sum(info.nbytes for info in outputs[name].values()))

    io.write_file(path, _written(outputs), tensors())


def _converted(rule: Rule, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        yield from rule.convert(name)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _finish(source: Path, partial: Path, target: Path, plan: _Plan, config: Mapping[str, Any]) -> None:
    io.copy_other_files(source, partial)
    io.write_text(partial / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    io.write_index(partial, {file: _written(outputs) for file, outputs in plan.items()})
    io.publish(partial, target)


@contextmanager
def _progress(total: int, files: int) -> Iterator[Callable[..., None]]:
    """A bar of the bytes written on a terminal, else a line for each finished file.

    Yields a function (bytes, finished file or None).
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    terminal = sys.stderr.isatty()
    done = 0
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not terminal) as bar:
        task = bar.add_task(f"0/{files} files", total=total)

        def advance(size: int, file: str | None = None) -> None:
            nonlocal done
            bar.advance(task, size)
            if file is not None:
                done += 1
                bar.update(task, description=f"{done}/{files} files")
                logger.log(logging.DEBUG if terminal else logging.INFO, "%d/%d %s", done, files, file)

        yield advance
