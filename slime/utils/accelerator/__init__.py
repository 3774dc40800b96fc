"""Which device this process computes on: one object that answers device, distributed backend, memory and streams.

Importing it is free of torch; the accelerator objects load torch when they are made.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

ACCELERATORS = ("cuda", "cpu")


class Accelerator(Protocol):
    """What the trainer and the orchestration ask of a device kind."""

    name: str
    distributed_backend: str
    ray_resource: str
    supports_memory_saver: bool

    def device(self, local_rank: int = 0) -> "torch.device":
        """The device of one local rank."""

    def set_device(self, local_rank: int) -> None:
        """Make the device of `local_rank` this process's current one."""

    def synchronize(self) -> None:
        """Wait until all queued work on the current device is done."""

    def empty_cache(self) -> None:
        """Return cached, unused device memory to the driver."""

    def memory(self) -> dict[str, float]:
        """Memory in GiB. cuda: total, free, allocated, reserved; cpu: total, free (host) and process (this RSS)."""

    def prepare_trainer(self) -> None:
        """Adapt the process to Megatron. Once per trainer process, before megatron is imported; idempotent."""


def detect_accelerator(device_directory: str | Path = "/dev") -> str:
    """The accelerator of this host, without torch: "cuda" where the NVIDIA driver exposes a GPU, else "cpu".

    A GPU is a device file nvidia<N> in `device_directory`.
    """
    return "cuda" if any(Path(device_directory).glob("nvidia[0-9]*")) else "cpu"


def get_accelerator(name: str) -> Accelerator:
    """The accelerator called `name`; ValueError names the legal ones."""
    if name == "cuda":
        from slime.utils.accelerator.cuda import CudaAccelerator

        return CudaAccelerator()
    if name == "cpu":
        from slime.utils.accelerator.cpu import CpuAccelerator

        return CpuAccelerator()
    raise ValueError(f"unknown accelerator {name!r}: expected one of {', '.join(ACCELERATORS)}")
