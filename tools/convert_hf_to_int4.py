r"""Quantises a Hugging Face checkpoint to INT4 in compressed-tensors' pack-quantized format.

    python tools/convert_hf_to_int4.py --input-dir Qwen3-4B --output-dir Qwen3-4B-INT4
    python tools/convert_hf_to_int4.py --input-dir Qwen3-4B --output-dir Qwen3-4B-INT4 --data-dir calibration.jsonl

The first rounds every weight to nearest. The second runs GPTQ over calibration data with llm-compressor, which wants
an environment of its own (other versions of transformers and compressed-tensors) and the whole model in memory.
Of a model with routed experts those are quantised, of a dense model every linear layer.
"""

import argparse
import importlib.util
import json
import shutil
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.checkpoint import has_routed_experts
from slime.backends.megatron_utils.megatron_to_hf.processors.directories import quantize_directory
from slime.backends.megatron_utils.megatron_to_hf.processors.formats import describe_scheme
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4
from slime.backends.megatron_utils.megatron_to_hf.processors.selection import ROUTED_EXPERTS_ONLY
from slime.utils import safetensors_io as io
from slime.utils.convert_checkpoint import Summary, run_tool
from slime.utils.safetensors_io import CheckpointDirectory, CheckpointError

# Routers are linear layers to llm-compressor.
ROUTERS = (r"re:.*\.gate$", r"re:.*\.shared_expert_gate$", r"re:.*\.router$")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the default of --method filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input-dir", type=Path, required=True, help="Hugging Face directory in bfloat16")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the INT4 directory appears")
    parser.add_argument(
        "--method", choices=("rtn", "gptq"), help="rounding to nearest, or GPTQ; default gptq if --data-dir is given"
    )
    parser.add_argument("--quant-type", choices=("W4A16",), default="W4A16", help="4-bit weights, 16-bit activations")
    parser.add_argument("--quant-group-size", type=int, default=32, help="input columns that share a scale")
    parser.add_argument("--max-workers", type=int, default=4, help="of rtn: files converted at the same time")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing output, once complete")
    gptq = parser.add_argument_group("GPTQ")
    gptq.add_argument(
        "--data-dir",
        type=Path,
        help='calibration data: .jsonl or .parquet with a column "text", "messages" or "prompt"',
    )
    gptq.add_argument("--num-calibration-samples", type=int, default=256, help="rows of it that are used")
    gptq.add_argument("--max-sequence-length", type=int, default=2048, help="tokens of a row that are used")
    gptq.add_argument("--dampening-frac", type=float, default=0.01, help="of the Hessian's mean diagonal, added to it")
    gptq.add_argument("--trust-remote-code", action="store_true", help="run code from --input-dir")
    args = parser.parse_args(argv)
    args.method = args.method or ("gptq" if args.data_dir else "rtn")
    if args.method == "gptq" and not args.data_dir:
        parser.error("--method gptq needs calibration data: --data-dir")
    if args.method == "rtn" and args.data_dir:
        parser.error("--method rtn does not use --data-dir; leave one of them away")
    for flag in ("quant_group_size", "max_workers", "num_calibration_samples", "max_sequence_length"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be at least 1")
    return args


def calibrate(args: argparse.Namespace) -> Summary:
    """GPTQ with llm-compressor. CheckpointError when it is not installed, and for all else that a user can mend."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise CheckpointError(
            "--method gptq needs llm-compressor, which is not installed: run this tool in an environment of its own "
            "with slime and `pip install llmcompressor`, or use --method rtn"
        )
    started = time.monotonic()
    source = CheckpointDirectory(args.input_dir)
    io.check_target(args.input_dir, args.output_dir, args.force)
    partial = io.partial_directory(args.output_dir, "gptq")
    shutil.rmtree(partial, ignore_errors=True)  # of a calibration that was interrupted; it cannot be continued
    partial.mkdir(parents=True)
    ignore = ["lm_head", *ROUTERS, *(ROUTED_EXPERTS_ONLY if has_routed_experts(source) else ())]
    _run_gptq(args, ignore, partial)
    for path in partial.iterdir():
        if path.suffix == ".safetensors":
            path.chmod((args.input_dir / "config.json").stat().st_mode)  # they are saved readable by the owner alone
        elif path.name not in ("config.json", io.INDEX):
            path.unlink()
    config = json.loads((partial / "config.json").read_text())
    # the rules as well as the modules they name: engines fuse layers under names that are not in the list
    listed = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = list(dict.fromkeys([*ignore, *listed]))
    io.copy_other_files(args.input_dir, partial)
    io.write_text(partial / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    result = CheckpointDirectory(partial)
    io.write_index(partial, {name: file.infos for name, file in result.files.items()})
    io.publish(partial, args.output_dir)
    sizes = [
        sum(info.nbytes for file in each.files.values() for info in file.infos.values()) for each in (source, result)
    ]
    seconds = time.monotonic() - started
    return Summary(len(result.weight_map), len(result.files), 0, sizes[0], sizes[1], seconds, complete=True)


def _run_gptq(args: argparse.Namespace, ignore: list[str], output: Path) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.input_dir, trust_remote_code=args.trust_remote_code)
    rows = _token_rows(args, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(
        args.input_dir, dtype="auto", trust_remote_code=args.trust_remote_code, device_map="auto"
    )
    groups = describe_scheme(PackedInt4(args.quant_group_size), ignore)["config_groups"]
    del groups["group_0"]["weights"]["observer"]  # the modifier's own
    recipe = GPTQModifier(config_groups=groups, ignore=ignore, dampening_frac=args.dampening_frac)
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": rows}),
        recipe=recipe,
        max_seq_length=args.max_sequence_length,
        num_calibration_samples=len(rows),
    )
    model.save_pretrained(output, save_compressed=True)


def _token_rows(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """The calibration data as token ids, cut to --max-sequence-length."""
    from slime.utils.data import read_file

    rows = []
    try:
        for number, row in enumerate(islice(read_file(args.data_dir), args.num_calibration_samples), start=1):
            rows.append(_tokens(row, tokenizer, f"{args.data_dir}, row {number}")[: args.max_sequence_length])
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"--data-dir: {error}") from error
    if not rows:
        raise CheckpointError(f"--data-dir {args.data_dir} has no rows")
    return rows


def _tokens(row: dict[str, Any], tokenizer: Any, where: str) -> Sequence[int]:
    content = next((row[key] for key in ("text", "messages", "prompt") if key in row), None)
    if isinstance(content, str):
        return tokenizer(content)["input_ids"]
    if isinstance(content, list):
        return tokenizer(tokenizer.apply_chat_template(content, tokenize=False), add_special_tokens=False)["input_ids"]
    raise ValueError(f'{where} has no column "text", "messages" or "prompt" (it has {", ".join(row)})')


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    args = parse_args(argv)
    if args.method == "gptq":
        run_tool(lambda: calibrate(args))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run_tool(
        lambda: quantize_directory(
            args.input_dir,
            args.output_dir,
            PackedInt4(args.quant_group_size),
            device=device,
            max_workers=args.max_workers,
            force=args.force,
        )
    )


if __name__ == "__main__":
    main()
