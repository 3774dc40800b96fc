"""Weights through a shared filesystem: a complete Hugging Face directory a version, which the engines load."""

import shutil
from pathlib import Path

import torch.distributed as dist

from slime.backends.megatron_utils.hf_checkpoint import save_hf_checkpoint
from slime.backends.megatron_utils.update_weight.base import Sent, WeightUpdater


class UpdateWeightFromDisk(WeightUpdater):
    """Writes <--update-weight-disk-dir>/weight_v<version> and removes it afterwards, unless told to keep it."""

    def send(self) -> Sent:
        """Write, then reload on all engines. Engines and trainers must see the same directory."""
        directory = Path(self.args.update_weight_disk_dir) / f"weight_v{self.weight_version:06d}"
        save_hf_checkpoint(self.args, self.model_chunks, directory)
        if dist.get_rank() != 0:
            return Sent()
        size = sum(file.stat().st_size for file in directory.iterdir())
        version = str(self.weight_version)
        self.on_all_engines(lambda client: client.update_weights_from_disk(str(directory), version))
        if not self.args.update_weight_disk_keep_files:
            shutil.rmtree(directory)
        return Sent(size, len(self.clients))
