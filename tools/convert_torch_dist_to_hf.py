r"""Writes a Megatron checkpoint (torch_dist) as a Hugging Face directory that transformers and SGLang load.

    python tools/convert_torch_dist_to_hf.py --input-dir runs/qwen3/iter_0000099 --origin-hf-dir Qwen3-4B \
        --output-dir Qwen3-4B-trained

One process, whatever the layout of the training. Names and shapes are held against the origin's; its config, tokenizer
and other files are copied. Weights come out unquantised. An interrupted conversion continues with the same command.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.megatron_utils.convert_process import Place, explain, megatron_process  # noqa: E402
from slime.utils.convert_checkpoint import Summary, run_tool  # noqa: E402
from slime.utils.safetensors_io import CheckpointError  # noqa: E402

ALONE = Place(0, 1, "localhost", 0)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input-dir", type=Path, required=True, help="iter_<n>, release, or the directory whose newest one is meant"
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="where the Hugging Face directory appears")
    parser.add_argument("--origin-hf-dir", type=Path, required=True, help="Hugging Face directory of the same model")
    parser.add_argument("--model-name", help="names the conversion table; default: model_type of config.json")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing --output-dir, once complete")
    parser.add_argument(
        "-a",
        "--add-missing-from-origin-hf",
        action="store_true",
        help="copy the tensors that the checkpoint lacks (prediction layers, a vision tower) from --origin-hf-dir",
    )
    parser.add_argument(
        "--chunk-size", type=int, default=5 * 1024**3, help="bytes of a file at most, 5 GiB by default"
    )
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding to keep; default: as in config.json")
    parser.add_argument("--max-workers", type=int, default=1, help="files written at the same time")
    options = parser.parse_args(argv)
    for flag in ("chunk_size", "vocab_size", "max_workers"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag.replace('_', '-')} {value} must be at least 1")
    return options


def convert(options: argparse.Namespace) -> Summary:
    """The conversion in a process where Megatron can be imported. ValueError for what users can mend."""
    from slime.backends.megatron_utils.checkpoint import TRACKER
    from slime.backends.megatron_utils.convert_args import directory_of_checkpoint, stored_model_args
    from slime.backends.megatron_utils.convert_back import HfOptions, write_hf
    from slime.backends.megatron_utils.initialize import initialize_megatron, shutdown_megatron
    from slime.backends.megatron_utils.torch_dist_stream import TorchDistReader

    reader = TorchDistReader(directory_of_checkpoint(options.input_dir, TRACKER))
    initialize_megatron(args := stored_model_args(options.origin_hf_dir, reader))
    chosen = HfOptions(
        model_name=options.model_name,
        vocab_size=options.vocab_size,
        add_missing=options.add_missing_from_origin_hf,
        shard_bytes=options.chunk_size,
        max_workers=options.max_workers,
        force=options.force,
    )
    try:
        return write_hf(args, reader, options.origin_hf_dir, options.output_dir, chosen)
    finally:
        shutdown_megatron()


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    options = parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def work() -> None:
        if not (options.origin_hf_dir / "config.json").is_file():
            raise CheckpointError(f"--origin-hf-dir {options.origin_hf_dir} is no directory with a config.json")
        with megatron_process(ALONE):
            run_tool(lambda: convert(options))

    explain(work)


if __name__ == "__main__":
    main()
