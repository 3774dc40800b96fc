"""Rollout data on disk: plain dicts of plain values, written beside the target and renamed, read back without running
any code.

Used for the debug dumps of a rollout and for the state of a data source.
"""

import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.rollout.base_types import flatten_samples
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def save_plain(data: Any, path: Path) -> None:
    """torch.save `data` after turning numpy values into torch or Python ones; the file appears complete or not at all.

    Raises TypeError that names the place of a value which could not be loaded again with weights_only=True.
    """
    plain = _to_plain(data, "data")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            torch.save(plain, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def load_plain(path: Path) -> Any:
    """What save_plain wrote, tensors on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def save_debug_rollout_data(args: Namespace, data: Any, rollout_id: int, evaluation: bool) -> Path | None:
    """Write the samples of one rollout to `--save-debug-rollout-data`; None when the flag is not set.

    data: nested lists of Sample, or the eval dict {dataset: {"samples": [...]}}. Eval dumps are named
    eval_<rollout_id>.
    """
    if args.save_debug_rollout_data is None:
        return None
    name = f"eval_{rollout_id}" if evaluation else rollout_id
    path = Path(args.save_debug_rollout_data.format(rollout_id=name))
    samples = [s for entry in data.values() for s in entry["samples"]] if evaluation else flatten_samples(data)
    save_plain({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, path)
    logger.info("wrote %d samples of rollout %s to %s", len(samples), name, path)
    return path


def load_debug_rollout_data(args: Namespace, rollout_id: int) -> list[Sample]:
    """Samples of `--load-debug-rollout-data` for this rollout.

    `--load-debug-rollout-data-subsample f` keeps k = floor(f * n) of them: the first k // 2 and the last k - k // 2.
    """
    path = Path(args.load_debug_rollout_data.format(rollout_id=rollout_id))
    if not path.is_file():
        raise FileNotFoundError(f"--load-debug-rollout-data: {path} does not exist (rollout {rollout_id})")
    samples = [Sample.from_dict(entry) for entry in load_plain(path)["samples"]]
    fraction = args.load_debug_rollout_data_subsample
    if fraction is None:
        return samples
    keep = int(len(samples) * fraction)
    if not 0 < keep <= len(samples):
        raise ValueError(
            f"--load-debug-rollout-data-subsample {fraction}: {fraction} * {len(samples)} samples of {path} = {keep}, "
            f"must be 1 to {len(samples)}"
        )
    return samples[: keep // 2] + samples[len(samples) - (keep - keep // 2) :]


def _to_plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float | bytes | torch.Tensor):
        return value.detach() if isinstance(value, torch.Tensor) else value
    if isinstance(value, dict):
        return {_to_plain(k, f"key of {where}"): _to_plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > 64 and set(map(type, value)) <= {int, float}:
            return value
        items = [_to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value.copy())
    if isinstance(value, np.ndarray):
        return _to_plain(value.tolist(), where)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"{where}: {type(value).__module__}.{type(value).__name__} cannot be stored; use plain values or tensors"
    )
