"""The example pages: commands are understood, arrays fit into the launchers, numbers are the plan's."""

import functools
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slime.plan.command import plan_of
from slime.plan.launch_script import read_launch_script
from slime.plan.render import print_plan
from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.upstream import load_tables
from slime.utils.layout.index_sharing import index_sharing_of_config, legal_splits
from tests.helpers.golden_plans import tokens_of

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "en" / "examples"
CONFIGS = ROOT / "tests" / "data" / "hf_configs"
LAUNCHERS = {
    "qwen3-4B.md": "run-qwen3-4B.sh",
    "glm4.7-355B-A32B.md": "run-glm4.7-355B-A32B.sh",
    "glm5.2-744B-A40B.md": "run-glm5.2-744B-A40B.sh",
}
# (page, processes that convert, as the page says how many nodes)
CONVERSIONS = {"qwen3-4B.md": None, "glm4.7-355B-A32B.md": (2, 8), "glm5.2-744B-A40B.md": (4, 8)}
STAND_INS = ("hf", "docker", "torchrun", "python")
RECORD = """
import json, sys
from pathlib import Path
here = Path(__file__).resolve()
with open(here.parent / "calls", "a") as file:
    file.write(json.dumps([here.name, *sys.argv[1:]]) + "\\n")
"""


@functools.cache
def blocks(page: str, language: str = "bash") -> list[str]:
    text = (EXAMPLES / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_every_page_is_tested_here():
    assert {path.name for path in EXAMPLES.glob("*.md")} == {*LAUNCHERS, "README.md"}


@pytest.mark.parametrize("page", LAUNCHERS)
def test_bash_reads_every_block(page):
    for block in blocks(page):
        subprocess.run(["bash", "-n", "-c", block], check=True)


@pytest.fixture(scope="module", params=LAUNCHERS)
def calls(request, tmp_path_factory) -> tuple[str, list[list[str]]]:
    """(page, what bash hands to the programs that the page's commands run), one shell for the page, as a reader has.

    Blocks that start a launcher are left out: they are planned elsewhere.
    """
    programs = tmp_path_factory.mktemp("programs")
    for name in STAND_INS:
        (programs / name).write_text(f"#!{sys.executable} -IS\n{RECORD}")
        (programs / name).chmod(0o755)
    text = "\n".join(block for block in blocks(request.param) if "bash scripts/run-" not in block)
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    text = re.sub(r"^python .*tools/plan\.py.*$", "", text, flags=re.MULTILINE)
    subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=ROOT, env=environ, check=True)
    return request.param, [json.loads(line) for line in (programs / "calls").read_text().splitlines()]


def test_downloads_name_a_place_below_the_base_directory(calls):
    page, made = calls
    downloads = [words[1:] for words in made if words[0] == "hf"]
    assert downloads and all(words[0] == "download" for words in downloads)
    places = {words[words.index("--local-dir") + 1] for words in downloads}
    tokens = (
        read_launch_script(ROOT / "scripts" / LAUNCHERS[page], environ={"DRY_RUN": "1", **_base(page)}, directory=ROOT)
        .commands[-1]
        .tokens
    )
    used = {tokens[tokens.index(flag) + 1] for flag in ("--hf-checkpoint", "--prompt-data")}
    used |= {tokens[tokens.index(flag) + 2] for flag in ("--eval-prompt-data",) if flag in tokens}
    assert [path for path in used if not any(path.startswith(place) for place in places)] == []


def _base(page: str) -> dict[str, str]:
    (base,) = set(re.findall(r"export BASE_DIR=(/\w+)", "\n".join(blocks(page))))
    return {"BASE_DIR": base, "MASTER_ADDR": "10.0.0.1"}


def test_conversions_are_read_by_their_tools(calls):
    """Flags of the tool, of Megatron and of the model file; what is written is what the launcher loads."""
    page, made = calls
    tools = [words for words in made if "tools/" in " ".join(words)]
    assert len(tools) >= 2
    for words in tools:
        place = next(i for i, word in enumerate(words) if word.startswith("tools/"))
        tool = importlib.import_module(words[place].removesuffix(".py").replace("/", "."))
        parsed = tool.parse_args(words[place + 1 :])
        if tool.__name__ != "tools.convert_hf_to_torch_dist":
            continue
        options, model = parsed
        assert Grammar(load_tables()).read(model).problems == [] and "--num-layers" in model
        script = (ROOT / "scripts" / LAUNCHERS[page]).read_text()
        assert f'--ref-load "${{BASE_DIR}}/{options.save.name}' in script
        if CONVERSIONS[page] is not None:
            flags = dict(zip(words[1:place:2], words[2:place:2], strict=True))
            assert (int(flags["--nnodes"]), int(flags["--nproc-per-node"])) == CONVERSIONS[page]
            assert flags["--node-rank"] == "1" and flags["--master-addr"] == "10.0.0.1"


def test_the_commands_of_older_instructions_mean_the_same(tmp_path):
    """Unquoted `${MODEL_ARGS[@]}`, paths that end in a slash and a PYTHONPATH without anything there."""
    (tmp_path / "torchrun").write_text(f"#!{sys.executable} -IS\n{RECORD}")
    (tmp_path / "torchrun").chmod(0o755)
    start = (
        "torchrun --nproc-per-node 8 --master-addr 10.0.0.1 --master-port 12345 --nnodes=2 --node-rank 1 tools/x.py"
    )
    text = f"""source scripts/models/glm4.5-355B-A32B.sh
        PYTHONPATH=/root/Megatron-LM/ {start} ${{MODEL_ARGS[@]}} --save $BASE_DIR/GLM-4.7-355B-A32B_torch_dist/
        {start} "${{MODEL_ARGS[@]}}" --save "$BASE_DIR/GLM-4.7-355B-A32B_torch_dist/" """
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BASE_DIR": "/base"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=ROOT, env=environ, check=True)
    older, newer = (json.loads(line) for line in (tmp_path / "calls").read_text().splitlines())
    assert older == newer and "[0]*3+[1]*89" in older


ARRAYS = [(page, block) for page in LAUNCHERS for block in blocks(page) if re.match(r"(?:[A-Z_]+\+?=\()", block)]


@pytest.mark.parametrize("page, block", ARRAYS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(ARRAYS)])
def test_arrays_fit_into_the_launcher(page, block, tmp_path):
    """The launcher with the lines of the page in front of its last command would start, and has these flags."""
    text = (ROOT / "scripts" / LAUNCHERS[page]).read_text()
    text = re.sub(r"^SCRIPT_DIR=.*$", f"SCRIPT_DIR={ROOT}/scripts", text, flags=re.MULTILINE)
    script = tmp_path / "run-mine.sh"
    script.write_text(text.replace("\nslime_launch ", f"\n{block}\nslime_launch "))
    environ = {"DRY_RUN": "1", "BASE_DIR": "/base", "MASTER_ADDR": "10.0.0.1"}
    tokens = read_launch_script(script, environ=environ, directory=ROOT).commands[-1].tokens
    plan, _ = plan_of(tokens, environ={})
    assert plan.verdict == "starts", plan.reasons
    assert {flag for flag in re.findall(r"--[a-z0-9-]+", block)} <= set(tokens)


QUOTED = [(page, block) for page in LAUNCHERS for block in blocks(page, "text") if block.startswith("$ DRY_RUN=1")]


@pytest.mark.parametrize("page, block", QUOTED, ids=[page for page, _ in QUOTED])
def test_what_a_plan_is_said_to_print_it_prints(page, block):
    """Every quoted line, in this order; `python -m tests.helpers.golden_plans` writes them anew."""
    command, *lines = block.splitlines()
    there = iter(printed(command.split()[-1], ""))
    missing = [line for line in lines if line != "..." and " ".join(line.split()) not in there]
    assert not missing and len(lines) > 4
    assert {page for page, _ in QUOTED} == set(LAUNCHERS)


@functools.cache
def printed(script: str, flags: str) -> tuple[str, ...]:
    """The lines of the plan of a launcher with further flags, spaces made one."""
    stream = io.StringIO()
    print_plan(plan_of([*tokens_of(script), *shlex.split(flags)], environ={})[0], stream)
    return tuple(" ".join(line.split()) for line in stream.getvalue().splitlines())


NEEDS = r"^{} .*? ([\d.]+) [\d.]+ (?:yes|NO)$"
# Words of a page with numbers left out, flags behind the launcher's, and the line of the plan that has the numbers.
SAID = {
    "glm5.2-744B-A40B.md": [
        ("{1} of them for {0} GB", "", r"^size ([\d,]+) GB in (\d+) buckets"),
        ("the fullest: {} of 78.8 GiB", "", NEEDS.format("weight update")),
        (
            "`--sglang-dp-size` 128) {} GiB",
            "--rollout-num-gpus-per-engine 128 --sglang-ep-size 128 --sglang-dp-size 128 "
            "--sglang-max-running-requests 1024",
            NEEDS.format("weight update"),
        ),
        ("needs {} GiB there", "--optimizer-offload-fraction 0.9", NEEDS.format("weight update")),
        ("halve it: {} GB a node", "--actor-num-nodes 64", r"^fullest node ([\d,]+) GB"),
        ("takes {} GB more", "--use-kl-loss --kl-loss-coef 0.001", r"reference and old weights (\d+) GB"),
        ("alone take {} GiB a GPU", "--hf-checkpoint /base/GLM-5.2", r"^generation .* weights ([\d.]+), one"),
    ],
    "glm4.7-355B-A32B.md": [
        ("layer: {} GiB in\ntraining", "--mtp-num-layers 1 --enable-mtp-training", NEEDS.format("training")),
        ("{} GiB in the weight update", "--mtp-num-layers 1 --enable-mtp-training", NEEDS.format("weight update")),
        ("memory: {} GB a node", "", r"^fullest node .* optimizer (\d+) GB"),
    ],
}
TERABYTES = {"glm5.2-744B-A40B.md": "", "glm4.7-355B-A32B.md": "--save /base/x --save-interval 20"}


@pytest.mark.parametrize("page", SAID)
def test_numbers_in_the_prose_are_the_plans(page):
    text, chinese = ((ROOT / "docs" / language / "examples" / page).read_text("utf-8") for language in ("en", "zh"))
    for words, flags, line in SAID[page]:
        found = re.search(line, "\n".join(printed(f"scripts/{LAUNCHERS[page]}", flags)), flags=re.MULTILINE)
        assert words.format(*found.groups()) in text
        assert [number for number in found.groups() if number not in chinese] == []
    saved = re.search(
        r"^Megatron ([\d,]+) GB", "\n".join(printed(f"scripts/{LAUNCHERS[page]}", TERABYTES[page])), re.M
    )
    assert f"{int(saved[1].replace(',', '')) / 1000:.1f} TB" in text


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pipeline_splits_are_all_legal_and_the_most_even(language):
    """Each row of the table: stages, and first/last (layers between); 78 layers with the published schedule."""
    text = (ROOT / "docs" / language / "examples" / "glm5.2-744B-A40B.md").read_text(encoding="utf-8")
    config = json.loads((CONFIGS / "glm5.2-744B-A40B.json").read_text())
    layers, sharing = config["num_hidden_layers"], index_sharing_of_config(config)
    rows = re.findall(r"^\| (\d+) \| (\d+/\d+.*) \|$", text, flags=re.MULTILINE)
    assert [int(stages) for stages, _ in rows] == [2, 4, 8, 16, 20]
    for stages, splits in rows:
        shown = [tuple(map(int, split)) for split in re.findall(r"(\d+)/(\d+)", splits)]
        assert shown == legal_splits(sharing, layers, int(stages))[:4]
        between = [int(count) for count in re.findall(r"\((\d+)\)", splits)]
        expected = [(layers - first - last) // (int(stages) - 2) for first, last in shown if int(stages) > 2]
        assert between == expected
    assert legal_splits(sharing, layers, 32) == [] and legal_splits(sharing, layers, 16)[0] == (10, 12)  # conversion
