"""Start and end Megatron in this process: process groups, model-parallel grid, seeds, Megatron's globals."""

import contextlib
import logging
import random
from argparse import Namespace
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu, tensor_parallel
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.rerun_state_machine import destroy_rerun_state_machine, initialize_rerun_state_machine
from megatron.training import global_vars

from slime.utils.misc import load_function

logger = logging.getLogger(__name__)


def initialize_distributed(args: Namespace, backend: str, init_method: str) -> bool:
    """Join the default process group; False when this process is in one already (it is then left as it is)."""
    if dist.is_initialized():
        return False
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=args.rank,
        world_size=args.world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    return True


def initialize_megatron(args: Namespace) -> None:
    """Megatron's model-parallel groups, seeds and globals. The default process group must exist.

    `args` is the namespace of `build_megatron_args`. Runs `--custom-megatron-init-path` last, as `f(args)`.
    """
    _quieten_megatron()
    global_vars.set_args(args)
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=True,
    )
    _seed(args)
    # Checkpoint loading asks the calculator for a batch size; slime's schedule, not this, decides the micro-batches.
    batch = args.micro_batch_size * args.data_parallel_size
    init_num_microbatches_calculator(args.rank, None, batch, args.micro_batch_size, args.data_parallel_size, False)
    initialize_rerun_state_machine()
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    if args.custom_megatron_init_path:
        load_function(args.custom_megatron_init_path)(args)


def shutdown_megatron() -> None:
    """Undo `initialize_megatron`; the default process group stays."""
    mpu.destroy_model_parallel()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    global_vars.destroy_global_vars()


@contextlib.contextmanager
def megatron_args(args: Namespace) -> Iterator[None]:
    """Let Megatron's functions see `args` as its global arguments for a while (another `load`, say)."""
    before = global_vars.get_args()
    global_vars.set_args(args)
    try:
        yield
    finally:
        global_vars.set_args(before)


def is_megatron_main_rank() -> bool:
    """The one rank that reports metrics: first of data and tensor parallel, on the last pipeline stage."""
    return (
        mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        and mpu.get_tensor_model_parallel_rank() == 0
        and mpu.is_pipeline_last_stage(ignore_virtual=True)
    )


def _quieten_megatron() -> None:
    """Megatron logs pages about buckets at INFO, and warnings that mean nothing here (then errors only)."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    for name in (
        "models.gpt.gpt_model",  # advertises its successor
        "rerun_state_machine",  # "disabled"
        "tensor_parallel.random",  # on the CPU there is one generator, which the GPU random state tracker does move
        "dist_checkpointing.strategies.torch",  # calls the writer that needs no extra package deprecated
    ):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)


def _seed(args: Namespace) -> None:
    seed = args.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += 10 * mpu.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, args.te_rng_tracker, args.inference_rng_tracker, use_cudagraphable_rng=False, force_reset_rng=True
    )
