"""Where training starts from, and what a resume needs: atomic Megatron checkpoints (torch_dist), HF weights.

Layout of `--save`: `iter_<rollout id, 7 digits>/` and `latest_checkpointed_iteration.txt`, which names the newest
complete one.
"""

import contextlib
import copy
import io
import logging
import os
import queue
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, mpu
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing

from slime.backends.megatron_utils.arguments import megatron_only
from slime.backends.megatron_utils.critic_head import loading_value_head
from slime.backends.megatron_utils.hf_checkpoint import load_hf_weights
from slime.backends.megatron_utils.initialize import megatron_args
from slime.backends.megatron_utils.model import TrainState
from slime.backends.megatron_utils.mtp import require_prediction_layers
from slime.utils.arguments.hf_config import TRACKER, is_hf_checkpoint, megatron_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointSource:
    """Weights to start from. `resume`: continue that run (optimizer, scheduler, random state, next rollout id)."""

    path: Path
    kind: str  # "megatron" | "hf"
    step: int | None
    resume: bool


def find_source(path: str | None, step: int | None = None, resume: bool = False) -> CheckpointSource | None:
    """What lies at `path`: a Megatron checkpoint directory, a checkpoint in one, HF weights, or None."""
    if (found := megatron_checkpoint(path)) is not None:
        directory, iteration = found
        return CheckpointSource(directory, "megatron", step if iteration is None else iteration, resume)
    if is_hf_checkpoint(path):
        return CheckpointSource(Path(path), "hf", None, False)
    return None


def resolve_load(args: Namespace) -> CheckpointSource:
    """The weights to start from: --load if it holds a checkpoint (resume), else --ref-load, else --hf-checkpoint.

    Raises ValueError listing what was looked at when none holds a checkpoint.
    """
    source = (
        find_source(args.load, args.ckpt_step, resume=not args.finetune)
        or find_source(args.ref_load, args.ref_ckpt_step)
        or find_source(args.hf_checkpoint)
    )
    if source is None:
        looked = f"--load {args.load}, --ref-load {args.ref_load}, --hf-checkpoint {args.hf_checkpoint}"
        raise ValueError(
            f"nothing to start from in {looked}: one must be a directory with {TRACKER} (Megatron) or config.json (HF)"
        )
    logger.info("loading %s checkpoint %s%s", source.kind, source.path, " (resuming)" if source.resume else "")
    return source


def load_checkpoint(args: Namespace, state: TrainState, source: CheckpointSource) -> int:
    """Load weights, with `source.resume` also optimizer, scheduler and random state; the rollout id to start with.

    Collective. A resumed run continues after its last rollout; converted (`release`) and HF weights begin at rollout
    0.
    """
    if source.kind == "hf":
        with torch.no_grad():
            load_hf_weights(args, state.model, str(source.path))
        if state.optimizer is not None:
            state.optimizer.reload_model_params()
        return args.start_rollout_id or 0

    iteration = _load_megatron(args, state, source)
    if args.start_rollout_id is not None:
        return args.start_rollout_id
    released = source.step is None and (source.path / TRACKER).read_text().strip() == "release"
    return iteration + 1 if source.resume and not released else 0


def _load_megatron(args: Namespace, state: TrainState, source: CheckpointSource) -> int:
    view = copy.copy(args)
    view.load, view.ckpt_step, view.exit_on_missing_checkpoint = str(source.path), source.step, False
    if source.step == 0 and (source.path / TRACKER).read_text().strip() != "0":
        raise ValueError(
            f"{source.path}/iter_0000000 is not the newest checkpoint there; Megatron cannot select step 0"
        )
    if not source.resume:
        view.finetune = view.no_load_optim = view.no_load_rng = True
    if state.optimizer is None:
        view.no_load_optim = True
    require_prediction_layers(args, _directory(source))
    # In fp32 the optimizer's shards are views of the weights: they may be written only without gradient tracking.
    head = loading_value_head(state.model, _directory(source), not view.finetune)
    with head, megatron_args(view), torch.no_grad(), _stdout_to_log():
        iteration, _ = checkpointing.load_checkpoint(state.model, state.optimizer, state.scheduler)
    return iteration


def _directory(source: CheckpointSource) -> Path:
    """Where the files of a Megatron checkpoint are."""
    newest = (source.path / TRACKER).read_text().strip() if source.step is None else ""
    return source.path / ("release" if newest == "release" else f"iter_{int(newest or source.step):07d}")


def save_checkpoint(args: Namespace, state: TrainState, rollout_id: int) -> Path:
    """Write `<args.save>/iter_<rollout_id>` and make it the newest. Collective; returns its path.

    The files are written aside and renamed when complete, and the tracker is replaced last: at every moment the
    tracker names a complete checkpoint.
    """
    root = Path(args.save)
    final = root / f"iter_{rollout_id:07d}"
    partial = root / f".iter_{rollout_id:07d}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    with _stdout_to_log(), _results_in_process():
        _write(args, state, rollout_id, partial)
    dist.barrier()
    if dist.get_rank() == 0:
        _publish(partial, final, root / TRACKER, rollout_id)
    dist.barrier()
    return final


def _write(args: Namespace, state: TrainState, rollout_id: int, directory: Path) -> None:
    stored = megatron_only(args)
    with megatron_args(args):
        dp_cp_group = mpu.get_data_parallel_group(with_context_parallel=True)
        metadata = checkpointing._build_sharded_state_dict_metadata(args, dp_cp_group=dp_cp_group)
        rng_state = checkpointing.get_rng_state(
            args.ckpt_format, mpu.get_tensor_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
        )
        state_dict = checkpointing.generate_state_dict(
            stored,
            unwrap_model(state.model),
            state.optimizer,
            state.scheduler,
            rng_state,
            iteration=rollout_id,
            optim_sd_kwargs={"metadata": metadata},
            model_sd_kwargs={"metadata": metadata},
        )
        strategy = TorchDistSaveShardedStrategy()
        if args.ckpt_fully_parallel_save:
            strategy = FullyParallelSaveStrategyWrapper(strategy, dp_cp_group)
        dist_checkpointing.save(
            state_dict,
            str(directory),
            strategy,
            content_metadata=_clean_metadata_for_serialization(metadata),
            async_strategy="mcore",
        )


def _publish(partial: Path, final: Path, tracker: Path, rollout_id: int) -> None:
    """Rename the complete directory and point the tracker at it."""
    if final.exists():  # the same rollout again, after a resume from an earlier one
        replaced = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced)
    else:
        partial.rename(final)
    aside = tracker.with_name(f".{tracker.name}.partial")
    with aside.open("w") as file:
        file.write(str(rollout_id))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(tracker)


@contextlib.contextmanager
def _results_in_process() -> Iterator[None]:
    """Give the checkpoint writer a plain queue.

    megatron-core 0.19.2 makes a multiprocessing manager (a spawned process, seconds) for the results of its writer,
    also when the writer is a thread of this process, as it is in a synchronous save.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


@contextlib.contextmanager
def _stdout_to_log() -> Iterator[None]:
    """Megatron reports on checkpoints by print; here those lines are debug log records."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        if printed.getvalue():
            logger.debug("%s", printed.getvalue().rstrip())
