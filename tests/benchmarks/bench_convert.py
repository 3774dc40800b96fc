"""Speed and memory of the checkpoint tools beside a copy of the same files: python tests/benchmarks/bench_convert.py

Every measurement is a process of its own, so that its memory is its own; files are written through to the disk.
"""

import argparse
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

LAYERS_PER_FILE, HIDDEN, FFN = 4, 4096, 8192


def make_checkpoint(directory: Path, files: int) -> int:
    """A dense model of random bfloat16, about 0.8 GB a file. Returns its bytes."""
    import json

    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    shapes = {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    for number in range(files):
        tensors = {
            f"model.layers.{number * LAYERS_PER_FILE + layer}.{name}.weight": torch.randn(shape).bfloat16()
            for layer in range(LAYERS_PER_FILE)
            for name, shape in shapes.items()
        }
        save_file(tensors, directory / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def plain_copy(source: Path, target: Path, workers: int) -> None:
    """safetensors alone: read a file, write it, flush it to the disk."""
    import os

    from safetensors.torch import load_file, save_file

    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        save_file(load_file(path), target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())


def to_fp8(source: Path, target: Path, workers: int) -> None:
    from slime.backends.megatron_utils.megatron_to_hf.processors.directories import quantize_directory
    from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8

    quantize_directory(source, target, BlockFp8(), max_workers=workers)


def to_int4(source: Path, target: Path, workers: int) -> None:
    from slime.backends.megatron_utils.megatron_to_hf.processors.directories import quantize_directory
    from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4

    quantize_directory(source, target, PackedInt4(32), max_workers=workers)


def to_bf16(source: Path, target: Path, workers: int) -> None:
    from slime.backends.megatron_utils.megatron_to_hf.processors.directories import dequantize_directory

    dequantize_directory(source, target, max_workers=workers)


def _measured(work: Callable, source: Path, target: Path, workers: int, connection) -> None:
    import torch  # noqa: F401  (its import is neither speed nor memory of the work)

    before = _peak_memory()
    start = time.perf_counter()
    work(source, target, workers)
    seconds = time.perf_counter() - start
    connection.send((seconds, _peak_memory() - before))


def _peak_memory() -> int:
    """Bytes; getrusage would tell of the parent's as well."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measure(name: str, work: Callable, source: Path, target: Path, size: int, workers: int) -> float:
    """Prints GB/s of the bfloat16 bytes and the memory that the work added. Returns the GB/s."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_measured, args=(work, source, target, workers, sender)
    )
    process.start()
    seconds, memory = receiver.recv()
    process.join()
    print(f"{name:<36} {size / seconds / 1e9:6.2f} GB/s   {memory / 1e9:6.2f} GB of memory", flush=True)
    return size / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=3)
    parser.add_argument("--max-workers", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        root = Path(name)
        size = make_checkpoint(root / "bf16", args.files)
        print(f"{args.files} files of {size / args.files / 1e9:.2f} GB bfloat16")
        copy = measure("safetensors copy", plain_copy, root / "bf16", root / "copy", size, 1)
        shutil.rmtree(root / "copy")
        for workers in (1, args.max_workers):
            shutil.rmtree(root / "fp8", ignore_errors=True)
            speed = measure(f"bf16 -> fp8, {workers} workers", to_fp8, root / "bf16", root / "fp8", size, workers)
            print(f"    {100 * speed / copy:.0f} % of the copy")
        measure(
            f"fp8 -> bf16, {args.max_workers} workers", to_bf16, root / "fp8", root / "back", size, args.max_workers
        )
        shutil.rmtree(root / "back")
        measure(
            f"bf16 -> int4, {args.max_workers} workers", to_int4, root / "bf16", root / "int4", size, args.max_workers
        )
        measure(
            f"int4 -> bf16, {args.max_workers} workers", to_bf16, root / "int4", root / "back", size, args.max_workers
        )


if __name__ == "__main__":
    main()
