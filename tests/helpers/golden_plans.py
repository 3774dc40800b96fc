"""The plans that tests/data/plans keeps: how each is made, and the command that writes them again.

Run: python -m tests.helpers.golden_plans   (then look at `git diff tests/data/plans docs` before committing)
It also writes the printed examples of docs/*/advanced/plan.md again, and the lines that docs/*/examples quote.
"""

import functools
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.plan.as_json import dumps, to_json
from slime.plan.command import plan_of
from slime.plan.launch_script import read_launch_script
from slime.plan.render import print_plan, print_search
from slime.plan.suggest import Search, suggest

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "tests" / "data" / "plans"
CONFIGS = ROOT / "tests" / "data" / "hf_configs"
# Texts that change with the wording of checks; other tests are about them.
TITLES_LEFT_OUT = ("breaks a rule", "not supported yet", "not on this machine, not checked", "worth a look")
PAGES = [ROOT / "docs" / language / "advanced" / "plan.md" for language in ("en", "zh")]
EXAMPLES = sorted((ROOT / "docs").glob("*/examples/*.md"))
LEFT_OUT = ("problems", "notices", "differences", "reasons", "exit_code")


@dataclass(frozen=True)
class Golden:
    """A launch script and flags behind its own. config: of tests/data/hf_configs; without one the checkpoint's name
    says how it is quantized."""

    script: str
    config: str | None
    flags: tuple[str, ...] = ()


GLM_52_ON_64 = (
    *("--actor-num-nodes", "8", "--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "4"),
    *("--decoder-first-pipeline-num-layers", "18", "--decoder-last-pipeline-num-layers", "20"),
    *("--context-parallel-size", "2", "--expert-model-parallel-size", "16"),
    *("--rollout-num-gpus-per-engine", "32", "--sglang-dp-size", "32", "--sglang-ep-size", "32"),
    *("--sglang-config", str(DIRECTORY / "engines-64.yaml"), "--plan-gpu-memory-gb", "141"),
)
APART = ("--sglang-config", str(ROOT / "scripts/configs/glm5.2-744B-A40B-engines.yaml"))
GOLDENS = {
    "glm5.2-256": Golden("run-glm5.2-744B-A40B.sh", None, APART),
    "glm5.2-64": Golden("run-glm5.2-744B-A40B.sh", None, GLM_52_ON_64),
    "glm4.7-64": Golden("run-glm4.7-355B-A32B.sh", "glm4.5-355B-A32B"),
    "deepseek-r1-128": Golden("run-deepseek-r1.sh", "deepseek-v3"),
    "qwen3-30B-A3B-8": Golden("run-qwen3-30B-A3B.sh", "qwen3-30B-A3B"),
    "qwen3-4B-8": Golden("run-qwen3-4B.sh", "qwen3-4B"),
}


def golden(name: str) -> dict[str, Any]:
    """The plan of that name as it is kept: without texts, and of every kind of process group only the first."""
    recipe = GOLDENS[name]
    script = read_launch_script(
        ROOT / "scripts" / recipe.script,
        environ={"HOME": "/root", "DRY_RUN": "1", "BASE_DIR": "/shared", "MASTER_ADDR": "10.0.0.1"},
        directory=ROOT,
    )
    config = ["--plan-hf-config", str(CONFIGS / f"{recipe.config}.json")] if recipe.config else []
    plan, _ = plan_of([*script.commands[-1].tokens, *recipe.flags, *config], environ={})
    values = {key: value for key, value in to_json(plan).items() if key not in LEFT_OUT}
    groups = values["parallel"].pop("groups")
    values["parallel"]["first_groups"] = {kind: ranks[0] if ranks else [] for kind, ranks in groups.items()}
    return values


def documented(text: str) -> str:
    """A page of the documentation with its examples made anew: text blocks with `$ python tools/plan.py` on top."""
    return re.sub(
        r"(?<=```text\n)\$ python tools/plan\.py .*?(?=```)", lambda block: example(block[0]), text, flags=re.DOTALL
    )


@functools.cache
def search(script: str, gpus: int) -> Search:
    """The layouts for a launcher on GPUs of 80 GB: seconds of work that several tests look at."""
    return suggest(tokens_of(script), gpus=gpus, gpu_memory_gb=80, environ={})


def tokens_of(script: str) -> tuple[str, ...]:
    """The training flags of a launcher, its path relative to the repository."""
    return read_launch_script(Path(script), environ={"DRY_RUN": "1"}, directory=ROOT).commands[-1].tokens


def example(block: str) -> str:
    """The command of a block with what it prints, but for the parts whose wording changes with the checks (...)."""
    command = block.splitlines()[0]
    flags, stream = command.split()[3:], io.StringIO()
    script = flags[flags.index("--script") + 1]
    if "--suggest" in flags:
        gpus = int(flags[flags.index("--gpus") + 1])
        print_search(search(script, gpus), gpus, 80, stream)
    else:
        print_plan(plan_of(tokens_of(script), environ={})[0], stream)
    sections = re.split(r"\n\s*\n(?=[a-z])", "\n".join(line.rstrip() for line in stream.getvalue().splitlines()))
    kept = [section.strip("\n") for section in sections if section.splitlines()[0].strip() not in TITLES_LEFT_OUT]
    if "--suggest" not in flags:
        kept = [kept[0].splitlines()[0], "...", *kept[1:]]
    return command + "\n" + "\n\n".join(kept) + "\n"


def requoted(text: str) -> str:
    """A page with the lines that it quotes of a launcher's plan (text blocks with `$ DRY_RUN=1` on top) made anew."""
    return re.sub(r"(?<=```text\n)(\$ DRY_RUN=1 bash \S+\n)(.*?)(?=```)", _requoted, text, flags=re.DOTALL)


def _requoted(block: re.Match[str]) -> str:
    """A line is known by what stands before its first number; `...` stays."""
    stream = io.StringIO()
    print_plan(plan_of(tokens_of(block[1].split()[-1]), environ={})[0], stream)
    lines = {re.split(r"\d", line)[0]: line.rstrip() for line in reversed(stream.getvalue().splitlines())}
    return block[1] + "".join(lines.get(re.split(r"\d", line)[0], line) + "\n" for line in block[2].splitlines())


def main() -> None:
    """Write all of them."""
    for name in GOLDENS:
        (DIRECTORY / f"{name}.json").write_text(dumps(golden(name)), encoding="utf-8")
        sys.stdout.write(f"{name}\n")
    for page in PAGES:
        page.write_text(documented(page.read_text(encoding="utf-8")), encoding="utf-8")
    for page in EXAMPLES:
        page.write_text(requoted(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
