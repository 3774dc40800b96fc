r"""Casts an FP8 checkpoint (block, row or tensor scales) to bfloat16, for training.

    python tools/fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-R1 --output-bf16-hf-path DeepSeek-R1-bf16

The scales disappear, and so does the quantization_config. An interrupted cast continues with the same command.
"""

import argparse
from pathlib import Path

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.directories import dequantize_directory
from slime.utils.convert_checkpoint import run_tool


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True, help="quantised Hugging Face directory")
    parser.add_argument("--output-bf16-hf-path", type=Path, required=True, help="where the bfloat16 one appears")
    parser.add_argument("--max-workers", type=int, default=4, help="files converted at the same time")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing output, once complete")
    args = parser.parse_args(argv)
    if args.max_workers < 1:
        parser.error(f"--max-workers {args.max_workers} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run_tool(
        lambda: dequantize_directory(
            args.input_fp8_hf_path,
            args.output_bf16_hf_path,
            device=device,
            max_workers=args.max_workers,
            force=args.force,
        )
    )


if __name__ == "__main__":
    main()
