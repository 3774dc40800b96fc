"""Trained weights to the rollout engines: one class a transport, chosen by `choose_updater`."""

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from slime.backends.megatron_utils.update_weight.base import WeightUpdater


def choose_updater(args: Namespace, model_chunks: Sequence["torch.nn.Module"]) -> "WeightUpdater":
    """disk if --update-weight-transport disk, tensor if --colocate, else distributed."""
    if args.update_weight_mode != "full":
        raise ValueError(f"--update-weight-mode {args.update_weight_mode} is not supported yet; use full")
    if args.update_weight_transport == "disk":
        from slime.backends.megatron_utils.update_weight.from_disk import UpdateWeightFromDisk

        return UpdateWeightFromDisk(args, model_chunks)
    if args.colocate:
        from slime.backends.megatron_utils.update_weight.from_tensor import UpdateWeightFromTensor

        return UpdateWeightFromTensor(args, model_chunks)
    from slime.backends.megatron_utils.update_weight.from_distributed import UpdateWeightFromDistributed

    return UpdateWeightFromDistributed(args, model_chunks)
