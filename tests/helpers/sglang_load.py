"""Loads quantised directories through SGLang's own loader on a CPU and saves the parameters it ends up with.

    python -m tests.helpers.sglang_load OUT DIRECTORY[:LATER]...      (with the environment of loader_env)

Everything up to the kernels is SGLang's: reading config.json, choosing the layers' methods, creating parameters,
routing every checkpoint tensor into them. What comes afterwards, repacking for GPU kernels, is left out.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.server_args import CPU_STUB, SERVER_PATH

ROOT = Path(__file__).resolve().parents[2]
BUCKET = 200_000  # bytes of a push


def loader_env(environ: dict[str, str]) -> dict[str, str]:
    """The environment of a process that runs this module."""
    path = ":".join(map(str, (CPU_STUB, SERVER_PATH, ROOT)))
    return environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


def main(out: Path, directories: list[str]) -> None:
    """Save out/<directory name>.pt for each: {name: parameter}, and what latent attention derives from kv_b_proj.

    With ":<later>" the weights of that directory are then pushed into the model, in buckets as the trainer sends them;
    saved as out/<directory name>-<later name>.pt.
    """
    import torch

    # the capability of a Hopper GPU, which the methods for compressed tensors ask for before they create parameters
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.model_loader import loader

    store = f"file://{out / 'rendezvous'}"
    parallel_state.init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=store
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    torch.set_default_dtype(torch.bfloat16)
    for argument in directories:
        directory, _, later = argument.partition(":")
        model_config, model = _empty(Path(directory))
        model.load_weights(loader.DefaultModelLoader(LoadConfig())._get_all_weights(model_config, model))
        name = Path(directory).name
        if later:
            name += f"-{Path(later).name}"
            for bucket in _buckets(Path(later)):
                model.load_weights(bucket)
        torch.save(_held(model), out / f"{name}.pt")


def _empty(directory: Path) -> tuple[Any, Any]:
    """(SGLang's configuration, its model with parameters that hold what will not look right by luck)."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(directory),
        device="cpu",
        attention_backend="torch_native",
        dtype="bfloat16",
        moe_runner_backend="triton",
    )
    publish(args, role="test")
    model_config, load_config = ModelConfig.from_server_args(args), LoadConfig()
    initialize_dp_attention(args, model_config)
    quantization = loader._get_quantization_config(model_config, load_config)
    model = loader._initialize_model(model_config, load_config, quantization)
    for param in model.parameters():
        param.data.view(-1).view(torch.uint8).fill_(123)
    return model_config, model


def _held(model: Any) -> dict[str, Any]:
    import torch

    held = {name: param.data for name, param in model.named_parameters()}
    for name, module in model.named_modules():
        for derived in ("w_kc", "w_vc", "w_scale"):
            value = getattr(module, derived, None)
            if isinstance(value, torch.Tensor):
                held[f"{name}.{derived}"] = value.contiguous()
    return held


def _buckets(directory: Path) -> Iterator[list[tuple[str, Any]]]:
    """The tensors of a directory as the trainer pushes them: a weight with its scales, what is fused together."""
    from safetensors.torch import load_file

    from slime.backends.megatron_utils.update_weight.buckets import plan_buckets

    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    items: dict[str, list[tuple[str, Any]]] = {}
    for file in sorted(set(index.values())):
        for name, tensor in load_file(directory / file).items():
            module = re.sub(r"\.(q_a_proj|kv_a_proj_with_mqa)$", ".a_proj", name.rpartition(".")[0])
            items.setdefault(module, []).append((name, tensor))
    return plan_buckets(items.values(), BUCKET)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
