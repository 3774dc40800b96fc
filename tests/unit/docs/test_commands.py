"""The commands in the guides can be planned without a refusal, and tables about support say what the code does."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from slime.plan.command import plan_of
from slime.plan.launch_script import read_launch_script
from slime.utils.arguments.checkpoint_facts import TRAINABLE
from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.upstream import load_tables
from slime.utils.model_facts import load_config, supported_model_types
from tools.plan import parse, training_flags

ROOT = Path(__file__).resolve().parents[3]
GUIDES = ROOT / "docs" / "en"
CONFIGS = ROOT / "tests" / "data" / "hf_configs"
LANGUAGES = ("en", "zh")
SELF_MADE = "run-glm5.2-tiny.sh"  # makes its model first: it plans itself, below
REFUSED_ON_PURPOSE = "--decoder-first-pipeline-num-layers 12"  # the plan page explains this refusal


def code_of(page: str) -> str:
    text = (GUIDES / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```(?:bash|text)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE))
    return re.sub(r"\\\n\s*", "", code)


def lines_with(what: str) -> list[str]:
    """Lines of code in the guides and the README that hold these words, without prompt and comment."""
    pages = [path.relative_to(GUIDES).as_posix() for path in sorted(GUIDES.rglob("*.md"))]
    lines = "\n".join([*map(code_of, pages), code_of("../../README.md")]).splitlines()
    found = {re.sub(r"\s+#.*", "", line).removeprefix("$ ") for line in lines if what in line}
    return sorted(found)


def verdict_of(tokens: tuple[str, ...] | list[str]) -> tuple[str, tuple[str, ...]]:
    plan, _ = plan_of(list(tokens), environ={})
    return plan.verdict, plan.reasons


@pytest.mark.parametrize(
    "line", [line for line in lines_with("bash scripts/run-") if not line.startswith("#") and SELF_MADE not in line]
)
def test_launch_scripts_with_their_flags(line):
    """A guide's own example of fewer prompts was refused: they no longer filled an optimizer step."""
    words = shlex.split(line)
    settings = dict(word.split("=", 1) for word in words[: words.index("bash")])
    script, *flags = words[words.index("bash") + 1 :]
    environ = {"DRY_RUN": "1", "MASTER_ADDR": "10.0.0.1", "BASE_DIR": "/base", **settings}
    commands = read_launch_script(ROOT / script, environ=environ, directory=ROOT).commands
    verdict, reasons = verdict_of([*commands[-1].tokens, *flags])
    expected = ("illegal",) if REFUSED_ON_PURPOSE in line else ("starts", "not supported yet")
    assert verdict in expected, reasons


@pytest.mark.parametrize("line", lines_with("python tools/plan.py"))
def test_plans(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    verdict, reasons = verdict_of(training_flags(parse(shlex.split(line)[2:])))
    assert verdict in ("starts", "not supported yet") or "--suggest" in line, reasons


def test_a_script_of_ones_own(tmp_path):
    """The smallest launch script of the guide, as it stands there, starts."""
    (text,) = re.findall(r"^```bash\n(set -euo.*?)^```$", (GUIDES / "get_started/launch.md").read_text(), re.S | re.M)
    script = tmp_path / "run-mine.sh"
    script.write_text(re.sub(r"^SCRIPT_DIR=.*$", f"SCRIPT_DIR={ROOT}/scripts", text, flags=re.MULTILINE))
    (command,) = read_launch_script(script, environ={"DRY_RUN": "1"}, directory=ROOT).commands
    assert verdict_of(command.tokens)[0] == "starts"


@pytest.mark.parametrize("language", LANGUAGES)
def test_launch_scripts_that_run_today(language):
    """The last column of the table, against the verdict."""
    page = (ROOT / "docs" / language / "get_started" / "launch.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(scripts/[\w./-]+)` \|.*\| ([^|]+) \|$", page, flags=re.MULTILINE)
    launchers = {path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").glob("**/run-*.sh")}
    assert {script for script, _ in rows} == launchers - {"scripts/run-quickstart.sh", f"scripts/{SELF_MADE}"}
    environ = {"DRY_RUN": "1", "BASE_DIR": "/base", "MASTER_ADDR": "10.0.0.1"}
    for script, today in rows:
        tokens = read_launch_script(ROOT / script, environ=environ, directory=ROOT).commands[-1].tokens
        assert (verdict_of(tokens)[0] == "starts") == (today in ("runs", "可运行")), script


@pytest.mark.parametrize("language", LANGUAGES)
def test_models(language):
    """Every family once, each model file in its family's row, and "trained" where a run is not refused."""
    page = (ROOT / "docs" / language / "get_started" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| ([^|]+) \|$", page, flags=re.MULTILINE)
    families = [
        (re.findall(r"`(\w+)`", types), re.findall(r"`([\w.-]+)`", files), trained) for types, files, trained in rows
    ]
    families = [family for family in families if family[0] != ["model_type"]]
    assert sorted(name for names, _, _ in families for name in names) == sorted(supported_model_types())
    assert {name for names, _, trained in families if trained in ("yes", "是") for name in names} == set(TRAINABLE)
    described = {file: names for names, files, _ in families for file in files}
    assert described.keys() == {path.stem for path in (ROOT / "scripts" / "models").glob("*.sh")}
    for file, names in described.items():
        assert load_config(CONFIGS / f"{file}.json")[0]["model_type"] in names, file


def test_numbers_of_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {int(number) for number in re.findall(r"(\d+) model types", text)} == {len(supported_model_types())}
    files = len(list((ROOT / "scripts" / "models").glob("*.sh"))) - 1  # the quickstart's is no published checkpoint
    assert [int(number) for number in re.findall(r"for (\d+) checkpoints", text)] == [files]


REFUSED = {
    "a critic": ("--advantage-estimator", "ppo"),
    "routing replay": ("--use-routing-replay",),
    "asynchronous training": ("--update-weights-interval", "2"),
    "on-policy distillation": ("--use-opd",),
    "engine topologies": ("--sglang-config", "engines.yaml"),
    "fault tolerance": ("--use-fault-tolerance",),
}


def test_the_readme_names_what_is_refused():
    """Nothing that works is called missing, and nothing large that is missing is left out."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = text[text.index("is refused with") : text.index("are among them")]
    read = Grammar(load_tables()).read
    for feature, tokens in REFUSED.items():
        refused = any(problem.kind == "unsupported" for problem in read(tokens).problems)
        assert (feature in said) == refused, feature


DRY_RUNS = [
    ("DRY_RUN=1", "scripts/run-quickstart.sh"),
    ("DRY_RUN=yes", "scripts/run-quickstart.sh"),
    *(tuple(line.split("bash ")) for line in lines_with(f"bash scripts/{SELF_MADE}") if not line.startswith("bash")),
]


@pytest.mark.parametrize("settings, command", DRY_RUNS)
def test_a_dry_run_of_what_makes_its_own_model_trains_nothing(tmp_path, settings, command):
    """It looked like the other launchers, and DRY_RUN=1 trained for eight minutes."""
    given = dict(word.split("=") for word in settings.split())
    environ = {**os.environ, "DRY_RUN": "1", **given, "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        ["bash", *shlex.split(command)], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "verdict: starts" in done.stdout, done.stderr
    assert not (tmp_path / "out").exists()
