"""Trained weights to the rollout engines: one class a transport, chosen by `choose_updater`."""

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from slime.backends.megatron_utils.update_weight.base import WeightUpdater


def choose_updater(args: Namespace, model_chunks: Sequence["torch.nn.Module"]) -> "WeightUpdater":
    """disk if --update-weight-transport disk, tensor if --colocate, else distributed.

    ValueError for a mode that is not there, and for engines that repack the scales of FP8 blocks.
    """
    if args.update_weight_mode != "full":
        raise ValueError(f"--update-weight-mode {args.update_weight_mode} is not supported yet; use full")
    _check_scales(args)
    if args.update_weight_transport == "disk":
        from slime.backends.megatron_utils.update_weight.from_disk import UpdateWeightFromDisk

        return UpdateWeightFromDisk(args, model_chunks)
    if args.colocate:
        from slime.backends.megatron_utils.update_weight.from_tensor import UpdateWeightFromTensor

        return UpdateWeightFromTensor(args, model_chunks)
    from slime.backends.megatron_utils.update_weight.from_distributed import UpdateWeightFromDistributed

    return UpdateWeightFromDistributed(args, model_chunks)


def _check_scales(args: Namespace) -> None:
    """On Blackwell SGLang 0.5.17 packs the scales of FP8 blocks for DeepGEMM, unless other kernels are chosen, and a
    later weight no longer fits. Engines are taken to have GPUs like this one."""
    import torch

    from slime.backends.megatron_utils.megatron_to_hf import quantization_of

    on_blackwell = args.accelerator == "cuda" and torch.cuda.get_device_capability()[0] == 10
    if not on_blackwell or not (quantization_of(args) or {}).get("weight_block_size"):
        return
    lacking = [f"{flag} triton" for name, flag in _GEMM_FLAGS.items() if name not in args.sglang_overrides]
    if lacking:
        raise ValueError(
            "--hf-checkpoint holds FP8 blocks, whose scales engines on a Blackwell GPU repack for DeepGEMM so that "
            f"trained weights no longer fit; pass {' '.join(lacking)}"
        )


_GEMM_FLAGS = {
    "fp8_gemm_runner_backend": "--sglang-fp8-gemm-backend",
    "moe_runner_backend": "--sglang-moe-runner-backend",
}
