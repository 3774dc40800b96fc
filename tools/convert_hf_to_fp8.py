r"""Quantises the linear layers of a Hugging Face checkpoint to FP8 (e4m3).

    python tools/convert_hf_to_fp8.py --model-dir Qwen3-4B --save-dir Qwen3-4B-FP8

writes 128 x 128 blocks with one scale each. Embeddings, output layer, norms and routers stay as they are; the config
lists them. An interrupted conversion continues with the same command.
"""

import argparse
from pathlib import Path

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.directories import quantize_directory
from slime.backends.megatron_utils.megatron_to_hf.processors.formats import Format
from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8, ChannelFp8, TensorFp8
from slime.utils.convert_checkpoint import run_tool


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits on a combination that means nothing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory in bfloat16")
    parser.add_argument("--save-dir", type=Path, required=True, help="where the FP8 directory appears")
    parser.add_argument(
        "--strategy",
        choices=("block", "channel", "tensor"),
        default="block",
        help="one scale for each block, row (compressed-tensors format), or weight",
    )
    parser.add_argument("--block-size", type=int, nargs=2, metavar=("H", "W"), help="of --strategy block: 128 128")
    parser.add_argument("--scale-fmt", choices=("ue8m0",), help="of --strategy block: scales are powers of two")
    parser.add_argument(
        "--ignore-rules",
        nargs="+",
        default=[],
        metavar="RULE",
        help='modules to leave alone: path components ("layers.3", "self_attn") or a regular expression after "re:"',
    )
    parser.add_argument("--max-workers", type=int, default=4, help="files converted at the same time")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing --save-dir, once complete")
    args = parser.parse_args(argv)
    if args.strategy != "block" and (args.block_size or args.scale_fmt):
        parser.error(f"--block-size and --scale-fmt are for --strategy block, not {args.strategy}")
    if args.block_size and min(args.block_size) < 1:
        parser.error(f"--block-size {' '.join(map(str, args.block_size))}: both must be positive")
    if args.max_workers < 1:
        parser.error(f"--max-workers {args.max_workers} must be at least 1")
    return args


def make_format(args: argparse.Namespace) -> Format:
    """What the flags describe."""
    match args.strategy:
        case "channel":
            return ChannelFp8()
        case "tensor":
            return TensorFp8()
        case _:
            rows, columns = args.block_size or (128, 128)
            return BlockFp8((rows, columns), args.scale_fmt == "ue8m0")


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run_tool(
        lambda: quantize_directory(
            args.model_dir,
            args.save_dir,
            make_format(args),
            args.ignore_rules,
            device=device,
            max_workers=args.max_workers,
            force=args.force,
        )
    )


if __name__ == "__main__":
    main()
