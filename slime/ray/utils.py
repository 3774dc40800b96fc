"""What all Ray actors of the run share: boxed references, worker environments, waits that say whom they wait for."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

logger = logging.getLogger(__name__)

# Ray would otherwise hide devices from its workers; device ids here are physical ones, taken from the placement group.
NOSET_VISIBLE_DEVICES_ENV_VARS_LIST = [
    f"RAY_EXPERIMENTAL_NOSET_{family}_VISIBLE_DEVICES"
    for family in ("CUDA", "MUSA", "ROCR", "ASCEND_RT", "HABANA", "NEURON_RT", "TPU", "ONEAPI")
] + ["RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS", "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR"]


@dataclass(frozen=True)
class Box:
    """An object reference that Ray passes on as it is instead of fetching what it points to."""

    inner: ray.ObjectRef


def add_default_ray_env_vars(accelerator: str, env_vars: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment every actor of the run starts with; `env_vars` win. accelerator: "cuda" or "cpu"."""
    if accelerator == "cuda":
        defaults = dict.fromkeys(NOSET_VISIBLE_DEVICES_ENV_VARS_LIST, "1")
    else:
        defaults = {"OMP_NUM_THREADS": "1"}  # several processes share the cores; two threads each is 100 times slower
    return {**defaults, **(env_vars or {})}


def local_device_index(device_id: int | str, visible_devices: str | None) -> int:
    """Ordinal of a physical device among those the process sees. visible_devices: CUDA_VISIBLE_DEVICES, None if unset.

    Ids are compared as text, because both numbers and GPU UUIDs occur. Raises ValueError if the device is not visible,
    or is a UUID although no list of visible devices gives it a position.
    """
    if visible_devices is None:
        if not str(device_id).isdecimal():
            raise ValueError(
                f"Ray placed a worker on device {device_id!r}, whose index is unknown without CUDA_VISIBLE_DEVICES"
            )
        return int(device_id)
    visible = [entry.strip() for entry in visible_devices.split(",") if entry.strip()]
    if str(device_id) not in visible:
        raise ValueError(
            f"Ray placed a worker on device {device_id!r}, but CUDA_VISIBLE_DEVICES={visible_devices!r} hides it"
        )
    return visible.index(str(device_id))


def wait_for(
    refs: Mapping[str, ray.ObjectRef], doing: str, timeout: float | None = None, remind_every: float = 300.0
) -> dict[str, Any]:
    """Every reference's value under its name. The first failure is raised as it arrives, others are not waited for.

    doing: what the owners of the references do ("train rollout 3"). The owners still missing are logged every
    `remind_every` seconds and named by the TimeoutError raised after `timeout` seconds (None: no limit of its own).
    """
    started = time.monotonic()
    names = {ref: name for name, ref in refs.items()}
    values: dict[str, Any] = {}
    pending = list(names)
    while pending:
        waited = time.monotonic() - started
        if timeout is not None and waited >= timeout:
            raise TimeoutError(f"{doing}: no answer from {_list_of(pending, names)} after {timeout:g} s")
        patience = remind_every if timeout is None else min(remind_every, timeout - waited)
        ready, pending = ray.wait(pending, timeout=patience)
        if not ready and (timeout is None or time.monotonic() - started < timeout):
            logger.warning(
                "%s: still waiting for %s after %.0f s", doing, _list_of(pending, names), time.monotonic() - started
            )
        for ref in ready:
            try:
                values[names[ref]] = ray.get(ref)
            except Exception as error:
                error.add_note(f"{doing}: {names[ref]} failed")
                raise
    return {name: values[name] for name in refs}


def merge_metrics(parts: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """One flat dict of several; the parts without metrics (None) are those of ranks that report none."""
    return {name: value for part in parts if part for name, value in part.items()}


def _list_of(refs: Sequence[ray.ObjectRef], names: Mapping[ray.ObjectRef, str]) -> str:
    """Names of those waited for, shortened when there are many."""
    missing = [names[ref] for ref in refs]
    return ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
