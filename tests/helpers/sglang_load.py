"""Loads quantised directories through SGLang's own loader on a CPU and saves the parameters it ends up with.

    python -m tests.helpers.sglang_load OUT DIRECTORY...      (with the environment of loader_env)

Everything up to the kernels is SGLang's: reading config.json, choosing the layers' methods, creating parameters,
routing every checkpoint tensor into them. What comes afterwards, repacking for GPU kernels, is left out.
"""

import sys
from pathlib import Path

from slime.backends.sglang_utils.server_args import CPU_STUB, SERVER_PATH

ROOT = Path(__file__).resolve().parents[2]


def loader_env(environ: dict[str, str]) -> dict[str, str]:
    """The environment of a process that runs this module."""
    path = ":".join(map(str, (CPU_STUB, SERVER_PATH, ROOT)))
    return environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


def main(out: Path, directories: list[Path]) -> None:
    """Save out/<directory name>.pt for each."""
    import torch

    # the capability of a Hopper GPU, which the methods for compressed tensors ask for before they create parameters
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    store = f"file://{out / 'rendezvous'}"
    parallel_state.init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=store
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    torch.set_default_dtype(torch.bfloat16)
    for directory in directories:
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
            param.data.view(torch.uint8).fill_(123)  # what the loader misses will not look right by luck
        model.load_weights(loader.DefaultModelLoader(load_config)._get_all_weights(model_config, model))
        torch.save({name: param.data for name, param in model.named_parameters()}, out / f"{directory.name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(directory) for directory in sys.argv[2:]])
