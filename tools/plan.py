"""Prints the plan of a run on any machine: from a launch script, which is read and not run, or from training flags.

python tools/plan.py --script scripts/run-glm5.2-744B-A40B.sh [--set BASE_DIR=/shared] [-- further train.py flags]
python tools/plan.py -- --hf-checkpoint Qwen3-4B --colocate ...
python tools/plan.py --check -- --hf-checkpoint Qwen3-4B --colocate ...    # silent if the run would not be refused
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from slime.plan.as_json import dumps, plain  # noqa: E402
from slime.plan.command import plan_of, refuse, write_plan  # noqa: E402
from slime.plan.launch_script import LaunchScriptError, read_launch_script  # noqa: E402
from slime.plan.render import print_search  # noqa: E402
from slime.plan.suggest import suggest  # noqa: E402
from slime.utils.arguments import ArgumentsError  # noqa: E402
from slime.utils.arguments.limits import RANKS  # noqa: E402

USAGE_ERROR = 2


def parse(argv: list[str]) -> argparse.Namespace:
    """The tool's own flags; what follows -- is train.py's."""
    parser = argparse.ArgumentParser(prog="tools/plan.py", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--script", type=Path, help="launch script to take the training flags from")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="variable of the script")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="only say what the run would be refused for, if anything")
    parser.add_argument("--elsewhere", action="store_true", help="with --check: the run is for other machines")
    parser.add_argument("--rank", type=int, default=0, help="training rank whose process groups are shown")
    parser.add_argument("--gpu-memory-gb", type=float, help="memory a GPU is sold with; 80 if not given")
    parser.add_argument("--network-gb-per-s", type=float, help="network of one GPU in GB/s; 50 if not given")
    parser.add_argument("--suggest", action="store_true", help="search parallel layouts that are legal and fit")
    parser.add_argument("--gpus", type=int, help="training GPUs for --suggest; those of the flags if not given")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of one node for --suggest")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="training flags, behind those of the script")
    options = parser.parse_args(argv)
    if options.script is None and not options.flags:
        parser.error("give --script FILE, or training flags after --")
    wrong = [text for text in options.set if not text.partition("=")[0].isidentifier() or "=" not in text]
    if wrong:
        parser.error(f"--set {wrong[0]}: must be NAME=VALUE")
    for flag, count in (("--gpus", options.gpus), ("--gpus-per-node", options.gpus_per_node)):
        if count is not None and not 1 <= count <= RANKS:
            parser.error(f"{flag} {count}: must be within 1 and {RANKS}")
    if options.gpus is not None and not options.suggest:
        parser.error("--gpus is for --suggest; a plan has the GPUs of its flags")
    if options.elsewhere and not options.check:
        parser.error("--elsewhere is for --check; a plan is always for other machines")
    return options


def training_flags(options: argparse.Namespace) -> list[str]:
    """The tokens to plan; what should be known about how they were found goes to stderr. Raises LaunchScriptError."""
    tokens = []
    if options.script is not None:
        settings = dict(text.split("=", 1) for text in options.set)
        script = read_launch_script(options.script, environ={**os.environ, "DRY_RUN": "1"}, settings=settings)
        command = script.commands[-1]
        notes = list(script.notes)
        if len(script.commands) > 1:
            others = ", ".join(other.where for other in script.commands[:-1])
            notes.append(
                f"the script starts {len(script.commands)} runs; this is the last, at {command.where}, not {others}"
            )
        for note in notes:
            sys.stderr.write(f"note: {note}\n")
        tokens += command.tokens
    tokens += options.flags
    for flag, value in (
        ("--plan-gpu-memory-gb", options.gpu_memory_gb),
        ("--plan-network-gb-per-s", options.network_gb_per_s),
    ):
        tokens += [] if value is None else [flag, str(value)]
    return tokens


def main(argv: list[str]) -> int:
    """The tool. Returns the exit code: 0 if the run starts (or a layout fits), else 2."""
    options = parse(argv)
    try:
        tokens = training_flags(options)
        if options.check:
            refuse(tokens, environ=os.environ, elsewhere=options.elsewhere)
            return 0
        plan, json_path = plan_of(tokens, environ=os.environ)
        if plan.grid is not None and not 0 <= options.rank < plan.grid.world_size:
            raise ValueError(f"--rank {options.rank}: the training ranks are 0 to {plan.grid.world_size - 1}")
        if not options.suggest:
            write_plan(plan, "-" if options.json else json_path, sys.stdout, options.rank)
            return plan.exit_code
        gpus = options.gpus or plan.cluster.trainer_gpus
        memory = plan.assumptions.gpu_memory_gb
        search = suggest(
            tokens, gpus=gpus, gpus_per_node=options.gpus_per_node, gpu_memory_gb=memory, environ=os.environ
        )
    except (ArgumentsError, LaunchScriptError, ValueError) as error:
        # what a check says, the run would say
        sys.stderr.write(f"{'train.py' if options.check else 'tools/plan.py'}: {error}\n")
        return USAGE_ERROR
    if options.json:
        sys.stdout.write(dumps(plain(search)))
    else:
        print_search(search, gpus, memory, sys.stdout)
    return 0 if any(suggestion.fits for suggestion in search.suggestions) else USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
