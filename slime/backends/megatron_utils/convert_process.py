"""The processes of a conversion: where one stands among them, and Megatron on the CPU in each.

No GPU is used, whatever the host has: a conversion waits for the disk.
"""

import contextlib
import ctypes
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from slime.utils.accelerator import get_accelerator

# Ranks wait for the slowest disk among them.
_PATIENCE = timedelta(hours=12)

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h

# What concerns training, and GPUs.
_QUIET = ("megatron", "torch.utils.cpp_extension", "slime.backends.megatron_utils.arguments", "slime_plugins.models")
_NOISE = ("Transformer Engine and Apex", "Apex is not installed", "absl.logging", "torch.distributed is disabled")


@dataclass(frozen=True)
class Place:
    """A process among those of the conversion. The master's host and port are where they meet."""

    rank: int
    world_size: int
    host: str
    port: int


def place_of(environ: Mapping[str, str]) -> Place:
    """As torchrun (RANK, WORLD_SIZE) or Slurm's srun (SLURM_PROCID, SLURM_NTASKS) tells it, else the only process."""
    names = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS"))
    found = next((pair for pair in names if all(name in environ for name in pair)), None)
    rank, world_size = (int(environ[name]) for name in found) if found else (0, 1)
    host = environ.get("MASTER_ADDR") or environ.get("SLURM_LAUNCH_NODE_IPADDR") or "localhost"
    return Place(rank, world_size, host, int(environ.get("MASTER_PORT") or 12355))


@contextlib.contextmanager
def megatron_process(place: Place, under_torchrun: bool = False) -> Iterator[None]:
    """Megatron importable and on the CPU in this process, which has joined the others.

    under_torchrun: torchrun's own store is where they meet.
    """
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=f".*{message}")
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    get_accelerator("cpu").prepare_trainer()
    from slime.backends.megatron_utils import torch_te

    torch_te.install()
    torch.set_num_threads(1)  # all that is done is to copy memory; threads would wait for one another
    _keep_freed_memory()
    if place.world_size == 1:
        meeting = {"store": dist.HashStore()}
    else:
        meeting = {"init_method": "env://" if under_torchrun else f"tcp://{place.host}:{place.port}"}
    dist.init_process_group("gloo", rank=place.rank, world_size=place.world_size, timeout=_PATIENCE, **meeting)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _keep_freed_memory() -> None:
    """Let glibc use the memory of one tensor again for the next one.

    Otherwise each large tensor is mapped anew, and the kernel clears its pages, which takes longer than to copy them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def explain(convert: Callable[[], None]) -> None:
    """Run a tool's work; one sentence instead of a stack trace for what users can mend, and exit code 1."""
    try:
        convert()
    except ValueError as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        if not str(error).startswith("rank "):  # what another rank told
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing was replaced")
