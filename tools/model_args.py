"""Print the Megatron model arguments of a Hugging Face checkpoint, as the bash array that scripts/models/*.sh hold.

python tools/model_args.py /models/Qwen3-4B
python tools/model_args.py /models/Qwen3-4B --script qwen3-4B --knob rotary-base > scripts/models/qwen3-4B.sh
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.model_facts import KNOBS, ConfigError, load_config, megatron_args, to_script  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkpoint", type=Path, help="a directory with a config.json, or such a file")
    parser.add_argument("--script", metavar="NAME", help="name in the heading; the directory's (file's) by default")
    parser.add_argument(
        "--knob",
        action="append",
        default=[],
        choices=[flag.removeprefix("--") for flag in KNOBS],
        help="let an environment variable override this flag: "
        + ", ".join(f"{flag.removeprefix('--')} ({variable})" for flag, variable in KNOBS.items()),
    )
    parser.add_argument("--multimodal", action="store_true", help="the whole model with its vision tower")
    parser.add_argument("--json", action="store_true", help="print {flag: value} instead")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print; 2 with one line on stderr when the checkpoint cannot be described."""
    options = parse(argv)
    try:
        config, source = load_config(options.checkpoint)
        args = megatron_args(config, source=source, multimodal=options.multimodal)
    except ConfigError as error:
        print(f"model_args: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(args, indent=2))
        return 0
    name = options.script or options.checkpoint.resolve().stem
    about = ", ".join(config.get("architectures") or [])
    said = " --multimodal" if options.multimodal else ""
    print(to_script(name, args, [f"--{knob}" for knob in options.knob], about, said), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
