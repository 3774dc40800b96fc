"""Full-size models on the meta device, as every rank of a cluster would build them, and the tensors they export."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "hf_configs"
_EXPERT = re.compile(r"(.+\.mlp\.experts\.linear_fc[12]\.weight)(\d+)")


def exported_by_all_ranks(config_name: str, layout: list[str], sizes: dict[str, int]) -> Counter:
    """Counter of (Hugging Face name, shape) over the pipeline stages and expert-parallel ranks of a layout.

    Every tensor-parallel rank must hold the same share: shapes are of the whole tensors. A stage is built once; that
    its experts are numbered by the expert-parallel rank is asked of the naming function for each rank.
    sizes: world, pp, ep, tp, etp.
    """
    import torch

    from slime.utils.accelerator import get_accelerator

    get_accelerator("cpu").prepare_trainer()
    from slime.backends.megatron_utils import torch_te

    torch_te.install()
    torch.cuda.current_device = lambda: torch.device("meta")
    found: Counter = Counter()
    for pp_rank in range(sizes["pp"]):
        args, model = _build(config_name, layout, sizes["world"], pp_rank * sizes["world"] // sizes["pp"])
        for name, shape in _stage(args, model, sizes):
            found[name, shape] += 1
        _stop()
    return found


def _stage(args: Any, model: Any, sizes: dict[str, int]):
    import torch
    from megatron.core import mpu

    from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
    from slime.backends.megatron_utils.megatron_to_hf.sharding import is_expert, partition_dim
    from slime.backends.megatron_utils.update_weight.common import named_params

    for ep_rank in range(sizes["ep"]):
        mpu.set_expert_model_parallel_rank(ep_rank)
        for name, param in named_params(args, [model]):
            if ep_rank and not is_expert(name):
                continue  # the same on every expert-parallel rank
            shape, dim = list(param.shape), partition_dim(name, param)
            if dim is not None:
                shape[dim] *= sizes["etp" if is_expert(name) else "tp"]
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
