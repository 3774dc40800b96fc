"""Megatron's torch_dist format as a stream: tensors made when they are written, read one by one without a model.

Knows keys, shards and files; where a tensor comes from, and what becomes of it, is the caller's.
"""

import contextlib
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from slime.utils.safetensors_io import CheckpointError, write_in_pieces

# Keys of what is no weight of the model.
_NO_WEIGHTS = ("optimizer", "chained_", "rng_state", "rerun_state", "common_state", "opt_param_scheduler")


class StreamingSave(TorchDistSaveShardedStrategy):
    """Writes a sharded state of meta tensors; `materialize` gives each its values when its turn comes.

    materialize: meta tensor of the state -> tensor of the same shape and dtype on the CPU, called once a shard, in the
    order of `position`. written: told the bytes of every tensor that is on its way to the disk. The files are what
    Megatron itself writes.
    """

    def __init__(
        self,
        materialize: Callable[[torch.Tensor], torch.Tensor],
        position: Callable[[torch.Tensor], int],
        written: Callable[[int], None],
    ):
        super().__init__()
        self._materialize = materialize
        self._position = position
        self._written = written

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Collective. CheckpointException of torch when a rank fails."""
        shards = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)[0]
        dcp.save(
            mcore_to_pyt_state_dict(shards, False),
            storage_writer=_StreamingWriter(checkpoint_dir, self._written),
            planner=_StreamingPlanner(self._materialize, self._position),
        )


class _StreamingPlanner(MCoreSavePlanner):
    """Gives out values in the moment of writing. Torch's writers would keep the last tensor of every key alive."""

    def __init__(self, materialize: Callable[[torch.Tensor], torch.Tensor], position: Callable[[torch.Tensor], int]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._materialize = materialize
        self._position = position

    def create_local_plan(self) -> SavePlan:
        """Objects first, then tensors in order: Megatron's own order goes through all layers for every key."""
        plan = super().create_local_plan()
        plan.items.sort(key=self._place)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Without torch's search for overlapping shards, quadratic in their number: Megatron has done its own."""
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata

    def _place(self, item: WriteItem) -> int:
        return -1 if item.type == WriteItemType.BYTE_IO else self._position(self.lookup_object(item.index))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The bytes of an object, or a tensor with its values."""
        data = super().resolve_data(write_item)
        return data if write_item.type == WriteItemType.BYTE_IO else self._materialize(data)


class _StreamingWriter(FileSystemWriter):
    """One file a rank; one tensor in memory at a time."""

    def __init__(self, path: str | Path, written: Callable[[int], None]):
        super().__init__(path)
        self._report = written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank's plan in order."""
        future: Future[list[WriteResult]] = Future()
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        if plan.items:
            with (Path(self.path) / name).open("wb") as file:
                for item in plan.items:
                    results.append(self._write(file, name, item, planner.resolve_data(item)))
                file.flush()
                os.fsync(file.fileno())
        future.set_result(results)
        return future

    def _write(self, file: Any, name: str, item: WriteItem, data: torch.Tensor | io.BytesIO) -> WriteResult:
        start = file.tell()
        if isinstance(data, torch.Tensor):
            with _without_checksums():
                torch.save(_alone(data), _InPieces(file))
            self._report(data.nbytes)
        else:
            file.write(data.getbuffer())
        length = file.tell() - start
        return WriteResult(item.index, length, _StorageInfo(name, start, length))


class _InPieces:
    """What torch.save writes to: it hands over whole tensors."""

    def __init__(self, file: io.BufferedWriter):
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        """All of it. Returns the bytes."""
        view = memoryview(data).cast("B")
        write_in_pieces(self._file, view)
        return len(view)

    def flush(self) -> None:
        """Left to the end of the file."""


def _alone(data: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage holds nothing else: torch.save writes the whole storage of a view."""
    if data.untyped_storage().size() == data.nbytes:
        return data
    data = data.contiguous()
    if data.untyped_storage().size() == data.nbytes:
        return data
    return torch.from_numpy(data.view(-1).view(torch.uint8).numpy()).view(data.dtype).view(data.shape)


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """torch.save computes a checksum, at a quarter of the time, that torch.load does not look at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@dataclass
class TorchDistReader:
    """The weights of a torch_dist directory by Megatron's keys. CheckpointError when it cannot be read.

    Threads may read at the same time.
    """

    path: Path
    metadata: Metadata = field(init=False)
    _places: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        try:
            self.metadata = FileSystemReader(self.path).read_metadata()
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.path} is no complete torch_dist checkpoint: {error}") from error
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for file, end in ends.items():
            size = (self.path / file).stat().st_size if (self.path / file).is_file() else None
            if size is None or size < end:
                what = "is missing" if size is None else f"has {size} bytes instead of {end}: it is cut off"
                raise CheckpointError(f"{self.path / file} {what}")

    def common(self) -> dict[str, Any]:
        """What is stored beside the tensors: `args`, `iteration`, `content_metadata` ..."""
        return load_common_state_dict(str(self.path))

    @property
    def keys(self) -> set[str]:
        """The keys of weights: tensors that are no state of an optimizer."""
        tensors = self.metadata.state_dict_metadata.items()
        return {
            key
            for key, what in tensors
            if isinstance(what, TensorStorageMetadata)
            and not key.startswith(_NO_WEIGHTS)
            and "_extra_state" not in key
        }

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole tensor of a key."""
        return tuple(self.metadata.state_dict_metadata[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Of a key."""
        return self.metadata.state_dict_metadata[key].properties.dtype

    def files(self) -> list[Path]:
        """Every file of the directory, sorted."""
        return sorted(path for path in self.path.iterdir() if path.is_file())

    def read(self, key: str, offsets: Sequence[int], stacked: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The part of `key` that begins at `offsets`, as `read_into` says; in one piece where it lies so."""
        chunks = self._chunks(key, tuple(offsets[:stacked]), stacked)
        if (
            len(chunks) == 1
            and tuple(chunks[0].offsets) == tuple(offsets)
            and tuple(chunks[0].sizes[stacked:]) == shape
        ):
            return self._load(key, chunks[0]).reshape(shape)
        values = torch.empty(shape, dtype=self.dtype(key))
        self.read_into(values, key, offsets, stacked)
        return values

    def read_into(self, target: torch.Tensor, key: str, offsets: Sequence[int], stacked: int) -> None:
        """Copy the part of `key` that begins at `offsets` into target.

        target: without the first `stacked` dimensions, in which the part is one element. CheckpointError when the
        checkpoint does not hold all of it.
        """
        begin, size = tuple(offsets[stacked:]), tuple(target.shape)
        copied = 0
        for chunk in self._chunks(key, tuple(offsets[:stacked]), stacked):
            first, extent = tuple(chunk.offsets[stacked:]), tuple(chunk.sizes[stacked:])
            low = [max(a, b) for a, b in zip(begin, first, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(begin, size, first, extent, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            source = self._load(key, chunk).reshape(extent)
            taken = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, first, strict=True))
            put = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))
            target[put] = source[taken]
            copied += prod(b - a for a, b in zip(low, high, strict=True))
        if copied != target.numel():
            raise CheckpointError(
                f"{self.path}: {key} from {list(offsets)} needs {target.numel()} numbers, the files hold {copied}"
            )

    def _chunks(self, key: str, place: tuple[int, ...], stacked: int) -> list[ChunkStorageMetadata]:
        """The chunks at `place` of the first dimensions; looked up, since stacked keys have thousands."""
        if (key, stacked) not in self._places:
            places: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
            for chunk in self.metadata.state_dict_metadata[key].chunks:
                if any(size != 1 for size in chunk.sizes[:stacked]):
                    raise CheckpointError(
                        f"{self.path}: {key} has chunks of {list(chunk.sizes)}, layers are not apart"
                    )
                places.setdefault(tuple(chunk.offsets[:stacked]), []).append(chunk)
            self._places[key, stacked] = places
        return self._places[key, stacked].get(place, [])

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        info = self.metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        with (self.path / info.relative_path).open("rb") as file:
            part = cast(Any, _create_file_view(file, info.offset, info.length))
            try:
                return _load_alone(part)
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{file.name}: {key} at byte {info.offset} is damaged: {error}") from error


def _load_alone(part: Any) -> torch.Tensor:
    """torch.load of a file that holds one tensor on the CPU, its values read in one go: torch takes twice as long.

    part: a seekable binary file. RuntimeError, EOFError or UnpicklingError when it holds something else.
    """
    with torch.serialization.skip_data():
        tensor = torch.load(part, map_location="cpu", weights_only=True)
    part.seek(0)
    archive = torch._C.PyTorchFileReader(part)
    records = [name for name in archive.get_all_records() if name.startswith("data/")]
    if not isinstance(tensor, torch.Tensor) or len(records) != 1:
        raise RuntimeError(f"it holds {type(tensor).__name__} in {len(records)} parts, not one tensor")
    part.seek(archive.get_record_offset(records[0]))
    view = memoryview(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy())
    done = 0
    while done < len(view):  # one call reads at most 2 GiB
        got = part.readinto(view[done:])
        if not got:
            raise EOFError(f"ended at byte {done} of {len(view)}")
        done += got
    return tensor
