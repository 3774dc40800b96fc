r"""Writes a Hugging Face checkpoint as a Megatron checkpoint (torch_dist), which training loads in any layout.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint Qwen3-4B --save Qwen3-4B_torch_dist

The model follows from config.json; "${MODEL_ARGS[@]}" of scripts/models/*.sh and other model and parallel flags of
train.py are understood, and must agree with it. Under torchrun or srun every process writes its share. FP8 and INT4
checkpoints are read as bfloat16. One tensor is in memory at a time; --save changes only when all is written.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.megatron_utils.convert_process import Place, explain, megatron_process, place_of  # noqa: E402
from slime.utils.safetensors_io import CheckpointError  # noqa: E402

logger = logging.getLogger("convert")


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """(the tool's own flags, the model and parallel flags of train.py)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="Hugging Face directory to read")
    parser.add_argument(
        "--save", type=Path, required=True, help="directory for the checkpoint, which appears as release/ in it"
    )
    parser.add_argument(
        "--force", action="store_true", help="also where the checkpoints of a training run lie, which stay"
    )
    return parser.parse_known_args(argv)


def convert(options: argparse.Namespace, argv: list[str], place: Place) -> None:
    """The conversion in a process that has joined the others. ValueError for what users can mend."""
    from slime.backends.megatron_utils.convert import write_torch_dist
    from slime.backends.megatron_utils.convert_args import conversion_args
    from slime.backends.megatron_utils.initialize import initialize_megatron, shutdown_megatron

    args, differences = conversion_args(options.hf_checkpoint, argv, place.rank, place.world_size)
    if place.rank == 0:
        for line in differences:
            logger.warning("not as in config.json: %s", line)
        logger.info(
            "%d process(es): tensor %d x pipeline %d x expert %d, %s",
            place.world_size,
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.expert_model_parallel_size,
            str(args.params_dtype).removeprefix("torch."),
        )
    initialize_megatron(args)
    written = write_torch_dist(args, options.hf_checkpoint, options.save, options.force)
    logger.info("rank %d wrote %s", place.rank, written)
    shutdown_megatron()


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    options, model_argv = parse_args(argv)
    place = place_of(os.environ)
    level = logging.INFO if place.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def work() -> None:
        if not (options.hf_checkpoint / "config.json").is_file():
            raise CheckpointError(f"--hf-checkpoint {options.hf_checkpoint} is no directory with a config.json")
        with megatron_process(place, under_torchrun="TORCHELASTIC_RUN_ID" in os.environ):
            convert(options, model_argv, place)

    explain(work)


if __name__ == "__main__":
    main()
