"""NVIDIA GPUs: torch.cuda with NCCL."""

import torch

GIB = 1024**3


class CudaAccelerator:
    """torch.cuda behind the accelerator interface."""

    name = "cuda"
    distributed_backend = "nccl"
    ray_resource = "GPU"
    supports_memory_saver = True

    def device(self, local_rank: int = 0) -> torch.device:
        """cuda:<local_rank>."""
        return torch.device("cuda", local_rank)

    def set_device(self, local_rank: int) -> None:
        """Make cuda:<local_rank> the current device."""
        torch.cuda.set_device(local_rank)

    def synchronize(self) -> None:
        """Wait for the current device."""
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give cached blocks and closed IPC handles back."""
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def memory(self) -> dict[str, float]:
        """total, free (device-wide), allocated, reserved (this process), in GiB."""
        free, total = torch.cuda.mem_get_info()
        return {
            "total": total / GIB,
            "free": free / GIB,
            "allocated": torch.cuda.memory_allocated() / GIB,
            "reserved": torch.cuda.memory_reserved() / GIB,
        }

    def prepare_trainer(self) -> None:
        """Megatron was written for this device."""
