"""Full-size models on the meta device, as every rank of a cluster would build them, and the tensors they export."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "hf_configs"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the process groups of a layout without data parallelism."""

    world: int
    pp: int
    ep: int
    tp: int
    etp: int = 1


@dataclass(frozen=True)
class Rank:
    """What one rank builds. shapes: Megatron's name -> shape, parameters and buffers. groups: tp, ep and pp rank.

    elements, buffers and size (bytes) are counted; planned are the first two and the bytes of both, by the plan.
    """

    shapes: dict[str, tuple[int, ...]]
    groups: tuple[int, int, int]
    elements: int
    buffers: int
    size: int
    planned: tuple[int, int, int]


def built_by_ranks(
    config_name: str, layout: list[str], sizes: Sizes, every_rank: bool = False
) -> tuple[Counter, dict[int, Rank]]:
    """Counter of (Hugging Face name, shape) that all ranks export together, and what ranks of each stage hold.

    Of each pipeline stage the first, one in the middle and the last rank are built, which differ in their tensor- and
    expert-parallel rank; or every rank. The names are those of the first: shapes are of the whole tensors, and that
    experts are numbered by the expert-parallel rank is asked of the naming function for each rank.
    """
    import torch

    from slime.utils.accelerator import get_accelerator

    get_accelerator("cpu").prepare_trainer()
    from slime.backends.megatron_utils import torch_te

    torch_te.install()
    torch.cuda.current_device = lambda: torch.device("meta")
    found: Counter = Counter()
    ranks: dict[int, Rank] = {}
    stage = sizes.world // sizes.pp
    for pp_rank in range(sizes.pp):
        for offset in range(stage) if every_rank else (0, stage // 2 + 1, stage - 1):
            rank = pp_rank * stage + offset
            args, model = _build(config_name, layout, sizes.world, rank)
            ranks[rank] = _rank(args, model, pp_rank)
            if offset == 0:
                found.update(_stage(args, model, sizes))
            _stop()
    return found, ranks


def _rank(args: Any, model: Any, pp_rank: int) -> Rank:
    from megatron.core import mpu

    from slime.plan.parameters import Sizes as PlannedSizes
    from slime.plan.parameters import parameters_of_rank
    from slime.utils.layout.pipeline import pipeline_layout
    from slime.utils.model_shape import ModelShape

    groups = (mpu.get_tensor_model_parallel_rank(), mpu.get_expert_model_parallel_rank())
    tensors = dict(model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if "expert" in name}  # others are scratch
    plan = parameters_of_rank(ModelShape.from_args(args), pipeline_layout(args), PlannedSizes.from_args(args), pp_rank)
    return Rank(
        {name: tuple(tensor.shape) for name, tensor in (tensors | buffers).items()},
        (*groups, mpu.get_pipeline_model_parallel_rank()),
        sum(tensor.numel() for tensor in tensors.values()),
        sum(buffer.numel() for buffer in buffers.values()),
        sum(tensor.numel() * tensor.element_size() for tensor in (tensors | buffers).values()),
        (plan.total(), plan.buffers, 2 * plan.total() + 4 * plan.buffers),
    )


def _stage(args: Any, model: Any, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    import torch
    from megatron.core import mpu

    from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
    from slime.backends.megatron_utils.megatron_to_hf.sharding import is_expert, partition_dim
    from slime.backends.megatron_utils.update_weight.common import named_params

    for ep_rank in range(sizes.ep):
        mpu.set_expert_model_parallel_rank(ep_rank)
        for name, param in named_params(args, [model]):
            if ep_rank and not is_expert(name):
                continue  # the same on every expert-parallel rank
            shape, dim = list(param.shape), partition_dim(name, param)
            if dim is not None:
                shape[dim] *= sizes.etp if is_expert(name) else sizes.tp
            whole = torch.empty(shape, dtype=param.dtype, device="meta")
            yield from ((key, tuple(t.shape)) for key, t in convert_to_hf(args, args.model_name, name, whole))
    mpu.set_expert_model_parallel_rank(None)


def _build(config_name: str, layout: list[str], world: int, rank: int) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist
    from megatron.core import mpu, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from slime.backends.megatron_utils.arguments import build_megatron_args
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.utils.model_facts import megatron_args, to_tokens
    from tests.helpers.trainer import trainer_args

    config = json.loads((CONFIGS / f"{config_name}.json").read_text())
    facts = {flag: value for flag, value in megatron_args(config).items() if flag != "--allgather-cp"}
    driver = trainer_args("qwen3", "", bf16=True, model_name=config["model_type"])
    driver.hf_checkpoint = None
    tokens = ["--bf16", "--no-initialization", "--tokenizer-type", "NullTokenizer", "--tokenizer-model", "none"]
    driver.megatron_argv = [*to_tokens(facts), *tokens, *layout]
    args = build_megatron_args(driver, rank, world)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    with torch.device("meta"):
        model = get_model_provider_func(args)(mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage())
    return args, model


def _stop() -> None:
    import torch.distributed as dist
    from megatron.core import mpu

    mpu.destroy_model_parallel()
    dist.destroy_process_group()
