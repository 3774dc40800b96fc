"""Converts a checkpoint in either direction: tells what the input is, and runs the tool for it with the other flags.

    python tools/convert_to_hf.py --input-dir Qwen3-4B --output-dir Qwen3-4B_torch_dist
    python tools/convert_to_hf.py --input-dir runs/qwen3 --output-dir Qwen3-4B-trained --origin-hf-dir Qwen3-4B

A directory with a config.json is a Hugging Face checkpoint and becomes a Megatron one
(tools/convert_hf_to_torch_dist.py); any other is a Megatron checkpoint and becomes a Hugging Face directory
(tools/convert_torch_dist_to_hf.py).
"""

import argparse
import os
import sys
from pathlib import Path

FORMATS = ("hf", "torch_dist")


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input-dir", type=Path, required=True, help="checkpoint to read")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the result appears")
    parser.add_argument("--from", dest="source", choices=FORMATS, help="what --input-dir is; found out by default")
    parser.add_argument("--to", dest="target", choices=FORMATS, help="the other format, which is the default")
    options, rest = parser.parse_known_args(argv)
    source = options.source or ("hf" if (options.input_dir / "config.json").is_file() else "torch_dist")
    if options.target == source:
        parser.error(f"--input-dir {options.input_dir} is a checkpoint in {source} already")
    if source == "hf":
        tool, names = "convert_hf_to_torch_dist.py", ("--hf-checkpoint", "--save")
    else:
        tool, names = "convert_torch_dist_to_hf.py", ("--input-dir", "--output-dir")
    paths = [names[0], str(options.input_dir), names[1], str(options.output_dir)]
    os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name(tool)), *paths, *rest])


if __name__ == "__main__":
    main()
