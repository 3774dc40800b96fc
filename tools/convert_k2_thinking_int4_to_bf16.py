r"""Unpacks an INT4 checkpoint in compressed-tensors' pack-quantized format (Kimi-K2-Thinking) to bfloat16.

    python tools/convert_k2_thinking_int4_to_bf16.py --model-dir Kimi-K2-Thinking

writes Kimi-K2-Thinking_bf16. Several machines may share the work: each names some --files, and the call that converts
the last of them completes the directory.
"""

import argparse
from pathlib import Path

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.directories import dequantize_directory
from slime.utils.convert_checkpoint import run_tool


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the default of --output-dir filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-dir", type=Path, required=True, help="INT4 Hugging Face directory")
    parser.add_argument("--output-dir", type=Path, help="where the bfloat16 one appears; default <model-dir>_bf16")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="convert these weight files alone")
    parser.add_argument("--config-path", type=Path, help="a config.json to read instead of the directory's")
    parser.add_argument("--max-workers", type=int, default=4, help="files converted at the same time")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output, once complete")
    args = parser.parse_args(argv)
    if args.output_dir is None:
        args.output_dir = args.model_dir.with_name(args.model_dir.name + "_bf16")
    if args.max_workers < 1:
        parser.error(f"--max-workers {args.max_workers} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run_tool(
        lambda: dequantize_directory(
            args.model_dir,
            args.output_dir,
            config_path=args.config_path,
            only=args.files,
            device=device,
            max_workers=args.max_workers,
            force=args.overwrite,
        )
    )


if __name__ == "__main__":
    main()
