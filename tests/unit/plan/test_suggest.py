"""The search for layouts: what it proposes is legal for the real checks, in the documented order, and complete."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.plan.launch_script import read_launch_script
from slime.plan.memory import trainer_memory
from slime.plan.suggest import DECIDED, Layout, layouts, suggest, without
from slime.utils.arguments.reading import read_args
from slime.utils.model_shape import ModelShape
from tests.helpers import golden_plans

ROOT = Path(__file__).resolve().parents[3]
GLM = ROOT / "scripts" / "run-glm5.2-744B-A40B.sh"
REFERENCE = Layout(tp=4, pp=8, cp=8, dp=1, ep=32, etp=1, first=14, last=16)


def tokens(script: Path) -> list[str]:
    environ = {"HOME": "/root", "DRY_RUN": "1", "BASE_DIR": "/shared", "MASTER_ADDR": "10.0.0.1"}
    return list(read_launch_script(script, environ=environ, directory=ROOT).commands[-1].tokens)


@pytest.fixture(scope="module")
def search():
    return golden_plans.search(str(GLM.relative_to(ROOT)), 256)


def test_the_reference_layout_of_the_flagship_is_among_them():
    """TP 4, PP 8 with 14 and 16 layers at the ends, CP 8, EP 32 on 256 GPUs: known to run, so legal here."""
    a = read_args(tokens(GLM), environ={}, dry_run=True).args
    found = list(layouts(a, ModelShape.from_args(a), 256, 8))
    assert REFERENCE in found
    assert len(found) == len(set(found)) > 100


def test_suggestions_are_legal_and_fit(search):
    """Each passes all checks with its flags in place of the script's, and its memory is the plan's own figure."""
    assert len(search.suggestions) == 10 and search.remaining == ()
    rest = without(tokens(GLM), DECIDED)
    for suggestion in search.suggestions:
        reading = read_args(
            [*rest, "--actor-num-nodes", "32", "--actor-num-gpus-per-node", "8", *suggestion.flags],
            environ={},
            dry_run=True,
        )
        assert [str(problem) for problem in reading.problems if problem.kind == "rule"] == []
        a, layout = reading.args, suggestion.layout
        assert layout.tp * layout.pp * layout.cp * layout.dp == a.world_size == 256
        assert suggestion.fits
        assert tuple(rank.training for rank in trainer_memory(a)) == suggestion.peaks


def test_the_order_is_the_documented_one(search):
    keys = [(s.layout.tp * s.layout.cp, s.layout.ep, -s.layout.dp, s.bubble) for s in search.suggestions]
    assert keys == sorted(keys)


def test_stages_start_on_computing_layers_in_every_layout():
    """Top-k indices do not cross stages: no uniform pipeline of 78 layers is proposed."""
    a = read_args(tokens(GLM), environ={}, dry_run=True).args
    splits = {(x.pp, x.first, x.last) for x in layouts(a, ModelShape.from_args(a), 256, 8)}
    assert splits == {(1, None, None), (2, 38, 40), (4, 18, 20), (8, 14, 16), (16, 10, 12)}


def test_a_dense_model_gets_even_stages_and_no_expert_flags():
    found = suggest(tokens(ROOT / "scripts" / "run-qwen3-4B.sh"), gpus=8, gpu_memory_gb=80, environ={})
    best = found.suggestions[0]
    assert (best.layout.tp, best.layout.cp, best.layout.dp) == (1, 1, 8)  # it fits without any model parallelism
    assert "--expert-model-parallel-size" not in best.flags and "--sequence-parallel" not in best.flags
    assert all((x.first is None) == (36 % x.pp == 0) for x in (s.layout for s in found.suggestions))


def test_nothing_fits_is_said_and_the_nearest_are_shown():
    found = suggest(tokens(ROOT / "scripts" / "run-qwen3-4B.sh"), gpus=8, gpu_memory_gb=8, environ={})
    assert found.fitting == 0 and found.suggestions
    peaks = [s.peak for s in found.suggestions]
    assert peaks == sorted(peaks)


def test_problems_that_no_layout_solves_are_kept_apart():
    """A reward type that does not exist is no reason to propose nothing."""
    script = tokens(ROOT / "scripts" / "run-qwen3-4B.sh")
    found = suggest([*script, "--rollout-temperature", "0"], gpus=8, gpu_memory_gb=80, environ={})
    assert [problem.flags for problem in found.remaining] == [("--rollout-temperature",)]
    assert found.suggestions


def test_what_the_checks_refuse_is_not_proposed():
    """256 samples in fixed micro-batches of 64 are four: they cannot be dealt to eight data-parallel ranks."""
    script = [token for token in tokens(ROOT / "scripts" / "run-qwen3-4B.sh") if token != "--use-dynamic-batch-size"]
    script = without(script, {"--max-tokens-per-gpu": 1, "--balance-data": 0})
    argv = [*script, "--micro-batch-size", "64", "--rollout-max-response-len", "64"]
    found = suggest(argv, gpus=8, gpu_memory_gb=80, environ={})
    assert found.suggestions and found.remaining == ()
    assert {s.layout.dp for s in found.suggestions} <= {1, 2, 4}
    assert any(x.dp == 8 for x in layouts(*_arguments_and_shape(argv), 8, 8))


def _arguments_and_shape(argv: list[str]) -> tuple:
    a = read_args(argv, environ={}, dry_run=True).args
    return a, ModelShape.from_args(a)


def test_gpus_fill_nodes():
    with pytest.raises(ValueError, match="--gpus 12 does not fill nodes of 8"):
        suggest(tokens(GLM), gpus=12, gpu_memory_gb=80, environ={})


def test_without_removes_both_spellings():
    argv = ["--a", "1", "--sequence-parallel", "--context-parallel-size=4", "--b", "--actor-num-nodes", "2", "c"]
    assert without(argv, DECIDED) == ["--a", "1", "--b", "c"]


def tool(*argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_tool_prints_plans_and_suggestions():
    """Exit code 0 only for a run that starts; JSON on request; variables and further flags reach the script."""
    qwen = "scripts/run-qwen3-4B.sh"
    done = tool("--script", qwen, "--set", "NUM_GPUS=4", "--json", "--", "--rollout-seed", "7")
    plan = json.loads(done.stdout)
    assert done.returncode == plan["exit_code"] == 0 and plan["cluster"]["trainer_gpus"] == 4
    done = tool("--script", qwen, "--gpu-memory-gb", "16", "--rank", "3")
    assert done.returncode == 2 and "verdict: does not fit" in done.stdout and "groups of rank 3" in done.stdout
    done = tool("--script", qwen, "--suggest", "--gpus", "16", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["suggestions"][0]["layout"]["dp"] == 16
    done = tool("--script", qwen, "--suggest", "--gpu-memory-gb", "8")
    assert done.returncode == 2 and "0 fit" in done.stdout


@pytest.mark.parametrize(
    "argv, says",
    [
        ((), "give --script FILE, or training flags after --"),
        (("--script", "no.sh"), "cannot read no.sh"),
        (("--script", "scripts/run-qwen3-4B.sh", "--set", "X"), "--set X: must be NAME=VALUE"),
        (("--script", "scripts/run-qwen3-4B.sh", "--gpus", "8"), "--gpus is for --suggest"),
        (("--script", "scripts/run-qwen3-4B.sh", "--suggest", "--gpus", "0"), "--gpus 0: must be within 1 and"),
        (("--script", "scripts/run-qwen3-4B.sh", "--suggest", "--gpus-per-node", "0"), "--gpus-per-node 0: must be"),
        (("--script", "scripts/run-qwen3-4B.sh", "--rank", "8"), "--rank 8: the training ranks are 0 to 7"),
        (("--script", sys.executable), "it is no text"),
        (("--suggest", "--", "--num-rollout", "3"), "--num-layers is not given"),
    ],
)
def test_the_tool_explains_mistakes(argv, says):
    done = tool(*argv)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
