"""The plan as a whole: its verdicts, what it still says about a broken command line, its JSON, and the kept plans."""

import io
import json
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from slime.plan.as_json import dumps, to_json
from slime.plan.command import plan_of
from slime.plan.fit import visible_memory
from slime.plan.plan import Plan, make_plan
from slime.plan.ranks import KINDS
from slime.plan.render import WIDTH, print_plan, spans
from slime.utils.arguments import ArgumentsError
from slime.utils.arguments.reading import read_args
from tests.helpers.golden_plans import DIRECTORY, GOLDENS, PAGES, documented, golden

ROOT = Path(__file__).resolve().parents[3]
MODEL = (
    "--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128 --qk-layernorm --swiglu --disable-bias-linear --normalization RMSNorm "
    "--norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --use-rotary-position-embeddings "
    "--position-embedding-type rope"
).split()
RUN = (
    "--hf-checkpoint /nowhere/Qwen3-4B --prompt-data /nowhere/p.jsonl --num-rollout 10 --rollout-batch-size 32 "
    "--n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 9216 --colocate --rm-type math --tensor-model-parallel-size 2 --sequence-parallel "
    "--rollout-num-gpus-per-engine 2 --label-key label --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
).split()
TINY = [*MODEL, *RUN]


def plan(*more: str, without: tuple[str, ...] = ()) -> Plan:
    tokens = [token for token in TINY if token not in without]
    return plan_of([*tokens, *more], environ={})[0]


def page(p: Plan, rank: int = 0) -> str:
    stream = io.StringIO()
    print_plan(p, stream, rank)
    return stream.getvalue()


def test_a_legal_run_that_fits_starts():
    p = plan()
    assert (p.verdict, p.exit_code, p.problems, p.unsupported) == ("starts", 0, (), ())
    assert {flag for problem in p.absent for flag in problem.flags} == {"--hf-checkpoint", "--prompt-data"}
    assert p.not_computed == {}
    assert all(getattr(p, field.name) is not None for field in fields(Plan))


def test_a_small_gpu_does_not_fit_and_the_reason_has_the_numbers():
    """On 24 GB training alone needs more: the phase, the place, what it needs and what there is are named."""
    p = plan("--plan-gpu-memory-gb", "24")
    assert (p.verdict, p.exit_code) == ("does not fit", 2)
    training = next(phase for phase in p.phases if phase.name == "training")
    needs, has = training.bytes / 2**30, visible_memory(24) / 2**30
    assert f"training, pipeline stage 0: needs {needs:.1f} GiB, a GPU has {has:.1f} GiB" in p.reasons
    assert training.bytes == sum(size for _, size in training.parts) > visible_memory(24)


def test_a_broken_rule_is_illegal_and_the_rest_is_planned_all_the_same():
    """32 heads over 3 tensor ranks: no layout, but model, batches and engines are still worth reading."""
    p = plan("--tensor-model-parallel-size", "3")
    assert (p.verdict, p.exit_code) == ("illegal", 2)
    assert p.model.parameters == 4_022_468_096
    assert p.engines is not None and p.grid is None
    assert "rank grid" in p.not_computed and any("rank grid not computed" in reason for reason in p.reasons)
    assert "verdict: illegal" in page(p)


@pytest.mark.parametrize(
    "more",
    [
        ("--num-layers", "0"),
        ("--tensor-model-parallel-size", "0"),
        ("--context-parallel-size", "0"),
        ("--rollout-num-gpus-per-engine", "0"),
        ("--num-gpus-per-node", "0"),
        ("--actor-num-nodes", "0"),
        ("--rollout-batch-size", "0"),
        ("--global-batch-size", "0"),
        ("--micro-batch-size", "0", "--max-tokens-per-gpu", "0"),
        ("--sglang-dp-size", "3", "--sglang-enable-dp-attention"),
        ("--sglang-pp-size", "0"),
        ("--num-experts", "8", "--moe-layer-freq", "[1]*5"),
        ("--decoder-first-pipeline-num-layers", "3"),
    ],
    ids=" ".join,
)
def test_no_illegal_value_stops_the_plan(more):
    """Whatever is wrong, the plan comes out, is illegal, prints, and is JSON."""
    p = plan(*more)
    assert p.verdict == "illegal"
    assert len(page(p)) > 200
    json.loads(dumps(to_json(p)))


def test_a_layout_that_cannot_be_is_illegal_even_if_no_check_noticed():
    """36 layers in 5 stages, and the checks silent: the plan's own arithmetic must not let the run start."""
    reading = read_args(
        [*TINY, "--actor-num-nodes", "5", "--pipeline-model-parallel-size", "5"], environ={}, dry_run=True
    )
    silent = replace(reading, problems=[])
    p = make_plan(silent, gpu_memory_gb=80, network_gb_per_s=50)
    assert p.verdict == "illegal"
    assert any("--pipeline-model-parallel-size" in problem.flags for problem in p.problems)
    told = make_plan(reading, gpu_memory_gb=80, network_gb_per_s=50)
    assert len([x for x in told.problems if "--pipeline-model-parallel-size" in x.flags]) == 1  # not told twice


def test_an_unsupported_feature_is_told_apart_from_an_error():
    p = plan("--record-memory-history")
    assert p.verdict == "not supported yet" and p.exit_code == 2
    assert [problem.flags for problem in p.unsupported] == [("--record-memory-history",)]


def test_a_guess_about_the_checkpoint_does_not_fail_a_run():
    """Without its config.json nobody knows whether a checkpoint is quantized: an engine that is full in 16 bits is
    mentioned but does not decide; with the config it does."""
    small = ("--plan-gpu-memory-gb", "40", "--sglang-mem-fraction-static", "0.1")
    unknown = plan(*small)
    tight = [phase for phase in unknown.phases if not phase.fits]
    assert tight and not any(phase.certain for phase in tight)
    assert unknown.verdict == "starts"
    assert [phase.certain for phase in unknown.phases] == [True, False, False]
    apart = plan("--rollout-num-gpus", "8", without=("--colocate",))
    assert [phase.certain for phase in apart.phases] == [True, True, False]  # no engine on the trainer's GPUs
    assert any("not counted against the run" in reason for reason in unknown.reasons)
    assert any("planned as if it were unquantized" in notice for notice in unknown.notices)
    known = plan(*small, "--plan-hf-config", str(ROOT / "tests/data/hf_configs/qwen3-4B.json"))
    assert known.verdict == "does not fit"
    named = plan("--hf-checkpoint", "/nowhere/Qwen3-4B-FP8")
    assert any("as if it were fp8" in notice for notice in named.notices)
    assert 2 * named.generation[0].memory.weights < 1.3 * plan().generation[0].memory.weights


def test_without_offload_trainer_and_engine_hold_memory_side_by_side():
    """Colocated without offload, an engine's 60 % and the trainer's peak have to fit together."""
    beside = plan("--no-offload-rollout", "--no-offload-train", "--sglang-mem-fraction-static", "0.6")
    training = next(phase for phase in beside.phases if phase.name == "training")
    assert dict(training.parts)["engine_beside"] > 0.5 * beside.assumptions.gpu_bytes
    apart = next(phase for phase in plan().phases if phase.name == "training")
    assert "engine_beside" not in dict(apart.parts)


def test_debug_modes_plan_their_half():
    only_training = plan("--debug-train-only", without=("--colocate",))
    assert only_training.training and not only_training.generation and only_training.weight_sync is None
    only_generation = plan("--debug-rollout-only", without=("--colocate",))
    assert only_generation.generation and not only_generation.training and only_generation.grid is None
    assert only_generation.checkpoint is None and "weight update" not in page(only_generation)


def test_a_cpu_has_no_memory_of_its_own():
    p = plan("--accelerator", "cpu", "--plan-gpu-memory-gb", "1")
    assert p.phases == () and p.training and p.verdict == "starts"
    assert " fits" not in page(p)


def test_context_parallel_layout_is_named():
    """--allgather-cp chooses the exchange of keys and values; the cut stays zigzag for a model with full attention."""
    assert plan().context_parallel.layout == "whole"
    ring = plan("--context-parallel-size", "2").context_parallel
    gathered = plan("--context-parallel-size", "2", "--allgather-cp").context_parallel
    assert (ring.layout, ring.exchange) == ("zigzag", "point-to-point")
    assert (gathered.layout, gathered.exchange) == ("zigzag", "all-gather")


def test_checkpoint_bytes():
    """16-bit weights and three float32 numbers a parameter; weights alone without the optimizer."""
    full = plan("--save", "/nowhere/s", "--save-interval", "4", "--save-hf", "/nowhere/{rollout_id}").checkpoint
    assert full.megatron_bytes == 4_022_468_096 * 14 and full.hugging_face_bytes == 4_022_468_096 * 2
    assert (full.every, full.count) == (4, 3)  # after rollouts 4, 8 and the last
    assert plan("--save", "/nowhere/s", "--save-interval", "4", "--no-save-optim").checkpoint.megatron_bytes == (
        4_022_468_096 * 2
    )
    assert plan().checkpoint.megatron_bytes == 0


def test_json_has_a_version_and_every_group(tmp_path):
    p = plan("--plan-json", str(tmp_path / "plan.json"))
    values = json.loads(dumps(to_json(p)))
    assert values == to_json(p)
    assert values["version"] == 1
    assert list(values["parallel"]["groups"]) == list(KINDS)
    assert sorted(rank for group in values["parallel"]["groups"]["dp"] for rank in group) == list(range(8))
    assert {problem["kind"] for problem in values["problems"]} == {"absent"}
    assert sum(values["training"]["stages"][0]["parts"].values()) == values["training"]["stages"][0]["peak"]


def test_the_page_is_at_most_100_columns_wide_and_has_no_escape_codes_in_a_file():
    text = page(plan("--plan-gpu-memory-gb", "24"), rank=5)
    assert 80 < max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text
    assert "process groups of rank 5" in text and "4,022,468,096" in text


@pytest.mark.parametrize(
    "numbers, text",
    [
        ([], ""),
        ([7], "7"),
        ([3, 4], "3-4"),
        ([3, 4, 5], "3-5"),
        ([0, 8], "0, 8"),
        ([0, 8, 16, 24, 32], "0, 8, ... 32"),
        ([0, 2, 4], "0, 2, 4"),
        ([0, 1, 2, 6, 10], "0-2, 6, 10"),
        ([0, 1, 8, 9], "0-1, 8-9"),
    ],
)
def test_spans(numbers, text):
    assert spans(numbers) == text


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--plan-gpu-memory-gb", "0"), "--plan-gpu-memory-gb: is 0, must be > 0"),
        (("--plan-network-gb-per-s", "-1"), "--plan-network-gb-per-s: is -1, must be > 0"),
        (("--plan-hf-config", "/nowhere.json"), "--plan-hf-config: /nowhere.json does not exist"),
    ],
)
def test_assumptions_are_checked(flags, says):
    with pytest.raises(ArgumentsError, match=says):
        plan(*flags)


def test_dry_run_of_train_py_is_quick_and_light(tmp_path):
    """`python train.py ... --dry-run` prints the plan with no Ray, torch, Megatron or SGLang in the process."""
    heavy = ("torch", "megatron", "sglang", "transformers", "ray")
    code = (
        "import runpy, sys; sys.argv[0] = 'train.py'\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        f"finally: sys.stderr.write(repr([m for m in {heavy} if m in sys.modules]))"
    )
    out = tmp_path / "plan.json"
    start = time.perf_counter()
    command = [sys.executable, "-c", code, *TINY, "--dry-run", "--plan-json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert time.perf_counter() - start < 15
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("[]")
    assert "verdict: starts" in done.stdout
    assert json.loads(out.read_text())["verdict"] == "starts"
    command = [sys.executable, "train.py", *TINY, "--dry-run", "--num-gpu", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--num-gpu" in done.stdout and "verdict: illegal" in done.stdout


@pytest.mark.parametrize("name", GOLDENS)
def test_the_kept_plans_are_what_the_scripts_give(name):
    """A changed figure is seen. If it is meant: python -m tests.helpers.golden_plans, and look at the difference."""
    kept = json.loads((DIRECTORY / f"{name}.json").read_text())
    assert json.loads(dumps(golden(name))) == kept


def kept(name: str) -> dict:
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def test_key_figures_of_the_kept_plans():
    """Computed by hand from the published sizes, not by the plan's own code."""
    glm, small = kept("glm5.2-256"), kept("glm5.2-64")
    assert round(glm["model"]["parameters"] / 1e9, 1) == round(small["model"]["parameters"] / 1e9, 1) == 743.4
    assert round(glm["model"]["active"] / 1e9, 1) == 40.3
    # 14 | 6 x 8 | 16: stages start on layers that compute their own top-k
    assert [stage["layers"][0][0] for stage in glm["stages"]] == [0, 14, 22, 30, 38, 46, 54, 62]
    assert [len(stage["layers"][0]) for stage in small["stages"]] == [18, 20, 20, 20]
    assert all(stage["computing"][0] == stage["layers"][0][0] for plan in (glm, small) for stage in plan["stages"])
    assert sum(len(stage["computing"]) for stage in glm["stages"]) == 21
    assert glm["parallel"]["sizes"] == {"tp": 4, "cp": 8, "dp": 1, "pp": 8, "etp": 1, "ep": 32, "edp": 1}
    assert (glm["context_parallel"]["layout"], glm["context_parallel"]["exchange"]) == ("zigzag", "all-gather")
    # 256 experts over 32 ranks; each of 3 matrices of 2048 x 6144, in 8 MoE layers of a middle stage
    middle = glm["stages"][3]
    assert middle["experts"] == 8 and middle["expert_parameters"] == 8 * 8 * 3 * 2048 * 6144
    assert glm["weight_sync"]["bytes"] == 2 * glm["model"]["parameters"] + 75 * 256 * 4
    assert [engine["worker_type"] for engine in glm["engines"]["engines"]] == ["prefill", "decode", "decode", "decode"]
    assert glm["cluster"]["total_gpus"] == 256 and small["cluster"]["total_gpus"] == 64
    # weights 2 bytes, gradients 4 (but for the frozen indexers of 4 layers), both whole on every rank; the optimizer
    # is on the host
    last, indexer = glm["training"]["stages"][-1], 2048 * 32 * 128 + 6144 * 128 + 6144 * 32 + 2 * 128
    assert last["parts"]["weights"] == pytest.approx(2 * last["parameters"], rel=1e-3)
    assert last["parts"]["gradients"] == pytest.approx(4 * (last["parameters"] - 4 * indexer), rel=1e-4)
    assert last["parts"]["optimizer"] == 0 and last["host"]["optimizer"] > 0

    assert round(kept("deepseek-r1-128")["model"]["parameters"] / 1e9) == 671
    assert [len(s["layers"][0]) for s in kept("deepseek-r1-128")["stages"]] == [16, 16, 16, 13]
    assert round(kept("glm4.7-64")["model"]["parameters"] / 1e9) == 353
    assert kept("glm4.7-64")["stages"][0]["experts"] == 10  # 160 over 16
    assert round(kept("qwen3-30B-A3B-8")["model"]["parameters"] / 1e9, 1) == 30.5
    # Qwen3-4B: tied embedding 151936 x 2560; a layer: q and o 2 x 4096 x 2560, k and v 2 x 1024 x 2560, MLP
    # 3 x 9728 x 2560, four norms
    layer = 2 * 4096 * 2560 + 2 * 1024 * 2560 + 3 * 9728 * 2560 + 2 * 2560 + 2 * 128
    assert kept("qwen3-4B-8")["model"]["parameters"] == 151936 * 2560 + 36 * layer + 2560
    assert kept("qwen3-4B-8")["verdict"] == "starts"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parts[-3])
def test_the_documented_examples_are_real(path):
    """Written again by: python -m tests.helpers.golden_plans."""
    text = path.read_text(encoding="utf-8")
    assert documented(text) == text
    assert text.count("$ python tools/plan.py") == 2
