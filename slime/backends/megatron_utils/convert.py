"""A Hugging Face directory as a Megatron checkpoint, tensor by tensor: no model is ever in memory. All ranks write.

What tools/convert_hf_to_torch_dist.py does once it knows what is meant.
"""

import logging
import shutil
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, mpu
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization
from megatron.training import checkpointing
from rich.filesize import decimal
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.megatron_utils.checkpoint import TRACKER
from slime.backends.megatron_utils.initialize import megatron_args
from slime.backends.megatron_utils.meta_model import MetaModel, Parameter, open_bridge, without_values
from slime.backends.megatron_utils.torch_dist_stream import StreamingSave, TorchDistReader
from slime.backends.megatron_utils.update_weight.common import agree
from slime.utils import safetensors_io
from slime.utils.safetensors_io import CheckpointDirectory, CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """What a conversion to torch_dist did. tensors, bytes: of this rank's parameters."""

    path: Path
    tensors: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = decimal(int(self.bytes / max(self.seconds, 1e-3)))
        return f"{self.path}: {self.tensors} parameters, {decimal(self.bytes)}, {self.seconds:.1f} s, {rate}/s"


def write_torch_dist(args: Namespace, hf_directory: Path, root: Path, force: bool = False) -> Written:
    """The weights of a Hugging Face directory as `root`/release, and a tracker that names it. Collective.

    Every tensor of the directory is used, counted as left out by the family's rules, or refused by name, before
    anything is written. An older release is untouched until the new one is complete, and then replaced; where a
    training run's checkpoints lie, the tracker is turned away from them only with `force`. CheckpointError or
    ValueError for what users can mend (RuntimeError that tells it on ranks that did not fail).
    """
    model = MetaModel(args)
    bridge = agree(open_bridge, model, hf_directory)
    weights = agree(bridge.weights_class, hf_directory)
    bridge.load_weights(model.chunks, without_values(weights))
    partial = root / ".release.partial"
    agree(_prepare, root, partial, weights.directory, force)
    started = time.monotonic()
    progress = _Progress(sum(parameter.tensor.nbytes for parameter in model.parameters))
    last: tuple[Parameter, torch.Tensor] | None = None

    def materialize(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal last
        owner = model.owner(tensor)
        if last is None or last[0] is not owner:  # the shards of a parameter follow one another
            last = None
            values = bridge.shard(owner.model, owner.name, owner.tensor, weights)
            last = owner, values.to(owner.tensor.dtype).contiguous()
        start = last[1].storage_offset() + tensor.storage_offset()  # the values may be a view themselves
        return last[1].as_strided(tensor.size(), tensor.stride(), start)

    try:
        _save(args, model, partial, StreamingSave(materialize, model.position, progress.advance))
        agree(_publish, partial, root)
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        raise _named(failure, rank, partial) from failure
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
    return Written(root / "release", len(model.parameters), progress.done, time.monotonic() - started)


def _named(failure: BaseException, rank: int, partial: Path) -> Exception:
    """What a rank met while it wrote, as an error that names it."""
    if isinstance(failure, OSError):
        return CheckpointError(f"rank {rank} cannot write to {partial}: {failure.strerror or failure}")
    if isinstance(failure, RuntimeError) and "PytorchStreamWriter" in str(failure):
        return CheckpointError(f"rank {rank} cannot write to {partial}: {failure}")
    if isinstance(failure, ValueError):
        return type(failure)(f"rank {rank}: {failure}")
    return RuntimeError(f"rank {rank} failed: {type(failure).__name__}: {failure}")


def _prepare(root: Path, partial: Path, source: CheckpointDirectory, force: bool) -> None:
    if dist.get_rank() != 0:
        return
    safetensors_io.check_target(source.path, root / "release", force=True)
    newest = (root / TRACKER).read_text().strip() if (root / TRACKER).is_file() else "release"
    if newest != "release" and not force:
        raise CheckpointError(
            f"{root} holds the checkpoints of a training run (the newest: {newest}), which would no longer be found; "
            "choose another directory, or pass --force"
        )
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {partial}: {error.strerror}") from error
    needed = sum(info.nbytes for file in source.files.values() for info in file.infos.values())
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise CheckpointError(f"the output needs about {decimal(needed)}, {root} has {decimal(free)} free")


def _save(args: Namespace, model: MetaModel, directory: Path, strategy: StreamingSave) -> None:
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    with megatron_args(args):
        metadata = checkpointing._build_sharded_state_dict_metadata(args, dp_cp_group=group)
        state = model.state(metadata)
        chosen = FullyParallelSaveStrategyWrapper(strategy, group) if group.size() > 1 else strategy
        content = _clean_metadata_for_serialization(metadata)
        dist_checkpointing.save(state, str(directory), chosen, content_metadata=content)


def _publish(partial: Path, root: Path) -> None:
    if dist.get_rank() != 0:
        return
    try:
        TorchDistReader(partial)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; do all processes see the same directory?") from error
    safetensors_io.publish(partial, root / "release")
    aside = root / f".{TRACKER}.partial"
    safetensors_io.write_text(aside, "release")
    aside.replace(root / TRACKER)


class _Progress:
    """A log line for each tenth of this rank's bytes, from rank 0."""

    def __init__(self, total: int):
        self.done = 0
        self._total = total
        self._started = time.monotonic()
        self._tenths = 0

    def advance(self, size: int) -> None:
        """`size` more bytes are on their way."""
        self.done += size
        tenths = 10 * self.done // max(self._total, 1)
        if dist.get_rank() != 0 or tenths == self._tenths:
            return
        self._tenths = tenths
        rate = self.done / max(time.monotonic() - self._started, 1e-3)
        logger.info("%3d %%  %s  %s/s", 10 * tenths, decimal(self.done), decimal(int(rate)))
