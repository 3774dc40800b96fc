"""Safetensors directories as streams: one tensor in memory at a time, files and directories that appear whole or not.

Knows names, dtypes, bytes and files; knows nothing of models or quantisation.
"""

import json
import os
import shutil
import socket
from collections.abc import Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from io import BufferedIOBase, RawIOBase
from math import prod
from pathlib import Path

import torch

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf")
_MAX_HEADER = 100 * 1024**2  # the format's own limit
_PIECE = 256 * 1024
_TEMPORARY = ".tmp"


class CheckpointError(ValueError):
    """A file or directory is not what it must be, or cannot be written; the message names it and what is wrong."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header tells of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorInfo":
        """The description of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))


class TensorFile:
    """One safetensors file: its header, checked against the file's size, and tensors read on demand."""

    def __init__(self, path: Path):
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self._starts: dict[str, int] = {}
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, data_start = self._read_header(file, size)
        self._take(header, data_start, size)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in memory of its own."""
        info = self.infos[name]
        buffer = torch.empty(info.nbytes, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._starts[name])
            view = memoryview(buffer.numpy())
            done = 0
            while done < info.nbytes:  # one call reads at most 2 GiB
                got = file.readinto(view[done:])
                if not got:
                    raise CheckpointError(f"{self.path} ended at byte {done} of the {info.nbytes} of {name}")
                done += got
        return buffer.view(info.dtype).view(info.shape)

    def _read_header(self, file, size: int) -> tuple[dict, int]:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(_MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{self.path} is no safetensors file or is cut off: its first 8 bytes announce a header of {length} "
                f"bytes, the file has {size}"
            )
        try:
            return json.loads(file.read(length)), 8 + length
        except ValueError as error:
            raise CheckpointError(f"{self.path} has a header that is not JSON: {error}") from error

    def _take(self, header: dict, data_start: int, size: int) -> None:
        end = 0
        try:
            entries = sorted(
                (*entry["data_offsets"], name, entry["dtype"], tuple(entry["shape"]))
                for name, entry in header.items()
                if name != "__metadata__"
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} has a header that does not describe tensors: {error!r}") from error
        for begin, stop, name, dtype, shape in entries:
            if dtype not in DTYPES:
                raise CheckpointError(f"{self.path}: {name} has dtype {dtype}; known: {', '.join(DTYPES)}")
            info = TensorInfo(DTYPES[dtype], shape)
            if begin != end or stop - begin != info.nbytes:
                raise CheckpointError(
                    f"{self.path}: {name} {list(info.shape)} {dtype} needs {info.nbytes} bytes from byte "
                    f"{end}, the header says {begin} to {stop}"
                )
            end = stop
            self.infos[name] = info
            self._starts[name] = data_start + begin
        if data_start + end != size:
            raise CheckpointError(
                f"{self.path} has {size} bytes, its header describes {data_start + end}: it is cut off or damaged; "
                "download it again"
            )


class CheckpointDirectory:
    """The weights of a local Hugging Face directory: every header read and checked against the index.

    config_path: another config.json to read instead of the directory's own. CheckpointError when a file of the index
    is missing, or index and files do not hold the same tensors.
    """

    def __init__(self, path: str | Path, config_path: str | Path | None = None):
        self.path = Path(path)
        self._config_path = Path(config_path) if config_path else self.path / "config.json"
        if not self._config_path.is_file():
            raise CheckpointError(f"{self.path} is no Hugging Face directory: there is no {self._config_path}")
        index = self._read_index()
        names = sorted(set(index.values())) if index else sorted(file.name for file in self.path.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"{self.path} holds no *.safetensors file")
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.path / INDEX} lists {missing[0]}, which is not there ({len(missing)} of {len(names)} missing)"
            )
        self.files = {name: TensorFile(self.path / name) for name in names}
        self.weight_map = self._weight_map()
        if index:
            self._compare(index)

    @cached_property
    def config(self) -> dict:
        """config.json. CheckpointError when it is not JSON."""
        try:
            return json.loads(self._config_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{self._config_path} is not JSON: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self.weight_map

    def info(self, name: str) -> TensorInfo:
        """CheckpointError when there is no such tensor."""
        return self._file_of(name).infos[name]

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU. CheckpointError when there is no such tensor. Threads may read at the same time."""
        return self._file_of(name).read(name)

    def identity(self) -> list[tuple[str, int, int]]:
        """Name, size and modification time of every weight file: equal as long as nobody touches them."""
        stats = [(name, (self.path / name).stat()) for name in self.files]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    def _file_of(self, name: str) -> TensorFile:
        if name not in self.weight_map:
            raise CheckpointError(f"{self.path} has no tensor {name} (it has {len(self.weight_map)})")
        return self.files[self.weight_map[name]]

    def _read_index(self) -> dict[str, str]:
        path = self.path / INDEX
        if not path.is_file():
            return {}
        try:
            return json.loads(path.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is no index of weights: {error!r}") from error

    def _weight_map(self) -> dict[str, str]:
        weight_map: dict[str, str] = {}
        for file, tensors in self.files.items():
            twice = weight_map.keys() & tensors.infos.keys()
            if twice:
                name = min(twice)
                raise CheckpointError(f"{self.path}: {name} is in {weight_map[name]} and in {file}")
            weight_map.update(dict.fromkeys(tensors.infos, file))
        return weight_map

    def _compare(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            if self.weight_map.get(name) != file:
                where = f"it is in {self.weight_map[name]}" if name in self.weight_map else "no file has it"
                raise CheckpointError(f"{self.path / INDEX} says that {name} is in {file}, but {where}")
        unlisted = sorted(self.weight_map.keys() - index.keys())
        if unlisted:
            raise CheckpointError(
                f"{self.path / self.weight_map[unlisted[0]]} holds {unlisted[0]}, which {INDEX} does not list "
                f"({len(unlisted)} such tensors)"
            )


@contextmanager
def _errors_named(path: Path):
    """A failing system call, of whatever kind, as a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def write_file(
    path: Path, infos: Mapping[str, TensorInfo], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, TensorInfo]:
    """Write a safetensors file of exactly `infos`, taking the tensors as they come; the file appears when complete.

    Beside the tensor in hand nothing is held in memory. CheckpointError when a tensor is unexpected, comes twice, has
    another shape or dtype than announced or never comes, or when the disk refuses. Returns infos.
    """
    # wide types first, so that every tensor begins at a multiple of its element size
    order = sorted(infos, key=lambda name: (-infos[name].dtype.itemsize, name))
    header, starts = _header(infos, order)
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}{_TEMPORARY}")
    waiting = set(infos)
    try:
        with _errors_named(path), temporary.open("wb", buffering=0) as file:
            _write_at(file, 0, memoryview(header))
            for name, tensor in tensors:
                _expect(path, name, tensor, infos, waiting)
                waiting.discard(name)
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                _write_at(file, len(header) + starts[name], memoryview(data))
            if waiting:
                raise CheckpointError(f"{path}: {min(waiting)} was announced and never came ({len(waiting)} such)")
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return dict(infos)


def _header(infos: Mapping[str, TensorInfo], order: list[str]) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        info = infos[name]
        starts[name], end = end, end + info.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def _expect(path: Path, name: str, tensor: torch.Tensor, infos: Mapping[str, TensorInfo], waiting: set[str]) -> None:
    if name not in waiting:
        raise CheckpointError(f"{path}: {name} {'came twice' if name in infos else 'was not announced'}")
    if TensorInfo.of(tensor) != infos[name]:
        raise CheckpointError(f"{path}: {name} was announced as {infos[name]}, it is {TensorInfo.of(tensor)}")


def _write_at(file, offset: int, data: memoryview) -> None:
    file.seek(offset)
    write_in_pieces(file, data)


def write_in_pieces(file: RawIOBase | BufferedIOBase, data: memoryview) -> None:
    """All of `data` (bytes), in calls of at most 256 KiB.

    A call of many megabytes makes the kernel look for huge pages to cache it in, which a virtual machine may first
    have to get from its host: up to eight times as slow, measured.
    """
    done = 0
    while done < len(data):
        done += file.write(data[done : done + _PIECE])


def write_index(directory: Path, files: Mapping[str, Mapping[str, TensorInfo]]) -> int:
    """Write the index of {file name: its tensors}. Returns total_size, the bytes of all tensors."""
    weight_map = {name: file for file, infos in files.items() for name in infos}
    total = sum(info.nbytes for infos in files.values() for info in infos.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=2) + "\n")
    return total


def write_text(path: Path, text: str) -> None:
    """Write a small file, naming it when the disk refuses."""
    with _errors_named(path):
        path.write_text(text, encoding="utf-8")


def copy_other_files(origin: Path, target: Path) -> None:
    """Everything in the origin but weights and their indices: configuration, tokenizer, code, with sub-directories.

    Hidden files and directories (.git, .cache) stay behind. Links are followed.
    """
    for entry in sorted(origin.iterdir()):
        if entry.name.startswith(".") or (entry.is_file() and _is_weight(entry.name)):
            continue
        with _errors_named(target / entry.name):
            if entry.is_dir():
                (target / entry.name).mkdir(exist_ok=True)
            else:
                shutil.copy(entry, target / entry.name)
        if entry.is_dir():
            copy_other_files(entry, target / entry.name)


def _is_weight(name: str) -> bool:
    if name.startswith("tokenizer"):
        return False
    return name.endswith(_WEIGHT_SUFFIXES) or name.endswith(".index.json")


def partial_directory(target: Path, key: str) -> Path:
    """Where `target` is built up. The same key finds what an interrupted process left there."""
    return target.with_name(f"{target.name}.partial-{key}")


def other_partials(target: Path, key: str) -> list[Path]:
    """What conversions with other keys left behind, or are just building."""
    mine = partial_directory(target, key)
    return [path for path in sorted(target.parent.glob(f"{target.name}.partial-*")) if path != mine]


def remove_temporaries(directory: Path) -> None:
    """Files that a dead process of this host left half-written."""
    for path in directory.glob(f"*.{socket.gethostname()}.*{_TEMPORARY}"):
        process = int(path.name.removesuffix(_TEMPORARY).rpartition(".")[2])
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)


def is_complete(path: Path, infos: Mapping[str, TensorInfo]) -> bool:
    """Whether the file is there and holds exactly these tensors."""
    try:
        return TensorFile(path).infos == dict(infos)
    except (CheckpointError, FileNotFoundError):
        return False


def check_target(source: Path, target: Path, force: bool) -> None:
    """CheckpointError when `target` cannot become the output: it is or lies in the source, or exists without force."""
    if target.resolve() == source.resolve() or source.resolve() in target.resolve().parents:
        raise CheckpointError(f"the output {target} must lie outside the input {source}")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"the output {target} is a file")
    if target.exists() and any(target.iterdir()) and not force:
        raise CheckpointError(f"the output {target} exists; choose another, or replace it with --force")


def publish(partial: Path, target: Path) -> None:
    """Make the finished directory appear as `target`; what stood there goes away only then."""
    replaced = target.with_name(f"{target.name}.replaced-{os.getpid()}")
    with _errors_named(target):
        if target.exists():
            target.rename(replaced)
        try:
            partial.rename(target)
        except OSError:
            with suppress(FileNotFoundError):
                replaced.rename(target)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
