r"""Quantises a Hugging Face checkpoint to INT4 by rounding to nearest, in compressed-tensors' pack-quantized format.

    python tools/convert_hf_to_int4_direct.py --model-dir Qwen3-30B-A3B --save-dir Qwen3-30B-A3B-INT4 --group-size 128

Of a model with routed experts those are quantised, of a dense model every linear layer; --ignore-rules chooses
otherwise. An interrupted conversion continues with the same command.
"""

import argparse
from pathlib import Path

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.directories import quantize_directory
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4
from slime.utils.convert_checkpoint import run_tool


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory in bfloat16")
    parser.add_argument("--save-dir", type=Path, required=True, help="where the INT4 directory appears")
    parser.add_argument("--group-size", type=int, default=32, help="input columns that share a scale")
    parser.add_argument(
        "--is-symmetric",
        type=_truth,
        nargs="?",
        const=True,
        default=True,
        help="false: groups have a zero point as well; not for routed experts",
    )
    parser.add_argument(
        "--ignore-rules",
        nargs="+",
        metavar="RULE",
        help='modules to leave alone instead of the default choice: path components ("self_attn") or a regular '
        'expression after "re:"; embeddings, output layer, norms and routers are left alone in any case',
    )
    parser.add_argument("--max-workers", type=int, default=4, help="files converted at the same time")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing --save-dir, once complete")
    args = parser.parse_args(argv)
    if args.group_size < 1:
        parser.error(f"--group-size {args.group_size} must be at least 1")
    if args.max_workers < 1:
        parser.error(f"--max-workers {args.max_workers} must be at least 1")
    return args


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run_tool(
        lambda: quantize_directory(
            args.model_dir,
            args.save_dir,
            PackedInt4(args.group_size, args.is_symmetric),
            args.ignore_rules,
            device=device,
            max_workers=args.max_workers,
            force=args.force,
        )
    )


if __name__ == "__main__":
    main()
