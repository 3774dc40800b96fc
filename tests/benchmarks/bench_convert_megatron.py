"""Speed and memory of Hugging Face -> torch_dist -> Hugging Face beside a copy of the same files.

python tests/benchmarks/bench_convert_megatron.py [--layers 16] [--directory DIR]

Every measurement is a process of its own, so that its memory is its own; all files are written through to the disk.
The imports of Megatron (about 8 s) are not counted, building the model is.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOM = "slime.backends.megatron_utils"
HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCAB, LAYERS_PER_FILE = 2560, 9728, 32, 8, 128, 30_000, 4

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def make_checkpoint(directory: Path, layers: int) -> int:
    """Qwen3-4B's layers with a smaller vocabulary, random bfloat16, four layers a file. Returns the bytes."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (GROUPS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (GROUPS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    ends = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for start in range(0, layers, LAYERS_PER_FILE):
        named = {
            f"model.layers.{layer}.{name}": shape
            for layer in range(start, min(start + LAYERS_PER_FILE, layers))
            for name, shape in shapes.items()
        }
        tensors = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in (named | ends).items()}
        ends = {}
        save_file(tensors, directory / f"model-{start:05d}.safetensors", metadata={"format": "pt"})
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def plain_copy(source: Path, target: Path, workers: int) -> None:
    """safetensors alone: read a file, write it, flush it to the disk."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        save_file(load_file(path), target / path.name, metadata={"format": "pt"})
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())


def to_torch_dist(source: Path, target: Path, workers: int) -> None:
    from slime.backends.megatron_utils.convert import write_torch_dist
    from slime.backends.megatron_utils.convert_args import conversion_args
    from slime.backends.megatron_utils.initialize import initialize_megatron

    args, _ = conversion_args(source)
    initialize_megatron(args)
    write_torch_dist(args, source, target)


def to_hf(source: Path, target: Path, workers: int) -> None:
    from slime.backends.megatron_utils.convert_args import stored_model_args
    from slime.backends.megatron_utils.convert_back import HfOptions, write_hf
    from slime.backends.megatron_utils.initialize import initialize_megatron
    from slime.backends.megatron_utils.torch_dist_stream import TorchDistReader

    reader = TorchDistReader(source / "release")
    args = stored_model_args(source.with_name("hf"), reader)
    initialize_megatron(args)
    write_hf(args, reader, source.with_name("hf"), target, HfOptions(shard_bytes=10**9, max_workers=workers))


def _measured(work: Callable, source: Path, target: Path, workers: int, connection) -> None:
    from slime.backends.megatron_utils.convert_process import Place, megatron_process

    with megatron_process(Place(0, 1, "localhost", 0)):
        for module in ("slime_plugins.mbridge", *(f"{ROOM}.{name}" for name in ("convert", "convert_back"))):
            importlib.import_module(module)
        before, start = _peak_memory(), time.perf_counter()
        work(source, target, workers)
        connection.send((time.perf_counter() - start, _peak_memory() - before))


def _peak_memory() -> int:
    """Bytes; getrusage would tell of the parent's as well."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measure(work: Callable, source: Path, target: Path, workers: int = 1) -> tuple[float, int]:
    """(seconds, bytes of memory that the work added), in a process of its own. What stood at `target` goes first."""
    shutil.rmtree(target, ignore_errors=True)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_measured, args=(work, source, target, workers, sender)
    )
    process.start()
    result = receiver.recv()
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-workers", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default a temporary one")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as the tools do
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        root = Path(name)
        size = make_checkpoint(root / "hf", args.layers)
        files = [path.stat().st_size for path in (root / "hf").glob("*.safetensors")]
        print(f"{size / 1e9:.2f} GB bfloat16 in {len(files)} files, the largest {max(files) / 1e9:.2f} GB")
        works = {
            "safetensors copy": (plain_copy, root / "hf", root / "copy", 1),
            "Hugging Face -> torch_dist": (to_torch_dist, root / "hf", root / "megatron", 1),
            "torch_dist -> Hugging Face": (to_hf, root / "megatron", root / "one", 1),
            f"torch_dist -> HF, {args.max_workers} workers": (
                to_hf,
                root / "megatron",
                root / "many",
                args.max_workers,
            ),
        }
        taken: dict[str, list[tuple[float, int]]] = {what: [] for what in works}
        for _ in range(args.rounds):  # in turn: a machine that is busy for a while slows all of them
            for what, work in works.items():
                taken[what].append(measure(*work))
        copy = statistics.median(seconds for seconds, _ in taken["safetensors copy"])
        for what, results in taken.items():
            seconds, memory = statistics.median(s for s, _ in results), max(m for _, m in results)
            print(
                f"{what:<28} {size / seconds / 1e9:5.2f} GB/s (median of {args.rounds}), {100 * copy / seconds:3.0f} "
                f"% of the copy, {memory / 1e9:.2f} GB of memory, {memory / max(files):.2f} of the largest file"
            )


if __name__ == "__main__":
    main()
