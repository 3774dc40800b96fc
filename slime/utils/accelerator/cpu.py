"""The host processor: plain torch with gloo, and Megatron adapted to it."""

from pathlib import Path

import torch

from slime.utils.accelerator import megatron_shim

KIB_PER_GIB = 1024**2


class CpuAccelerator:
    """The CPU behind the accelerator interface. Everything is synchronous, so most answers are short."""

    name = "cpu"
    distributed_backend = "gloo"
    ray_resource = "CPU"
    supports_memory_saver = False

    def device(self, local_rank: int = 0) -> torch.device:
        """The one CPU device, whatever the rank."""
        return torch.device("cpu")

    def set_device(self, local_rank: int) -> None:
        """Nothing to choose."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def empty_cache(self) -> None:
        """The allocator of the C library keeps no device cache."""

    def memory(self) -> dict[str, float]:
        """total and free of the host, process = resident set of this process, in GiB."""
        host = _kibibytes(Path("/proc/meminfo"))
        process = _kibibytes(Path("/proc/self/status"))
        return {
            "total": host["MemTotal"] / KIB_PER_GIB,
            "free": host["MemAvailable"] / KIB_PER_GIB,
            "process": process["VmRSS"] / KIB_PER_GIB,
        }

    def prepare_trainer(self) -> None:
        """Install the Megatron shim. RuntimeError when megatron is already imported or torch sees a GPU."""
        if torch.cuda.is_available():
            raise RuntimeError(
                "accelerator cpu was asked for, but this process sees a CUDA device, which Megatron would use: "
                'start the trainer with CUDA_VISIBLE_DEVICES="" or use accelerator cuda'
            )
        megatron_shim.install()


def _kibibytes(proc_file: Path) -> dict[str, int]:
    """The `Name:   123 kB` lines of a /proc file."""
    rows = (line.split() for line in proc_file.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) == 3 and row[2] == "kB"}
