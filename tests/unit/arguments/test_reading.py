"""Reading a command line that cannot run: all of it is parsed and completed, and every reason is listed."""

import resource
import subprocess
import sys

import pytest

from slime.utils.arguments import Problem, read_args
from slime.utils.arguments.groups import GROUPS
from slime.utils.arguments.limits import LIMITS

# Sizes of Megatron and SGLang that slime calculates with.
UPSTREAM_SIZES = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--num-layers-per-virtual-pipeline-stage"),
    *("--num-experts", "--num-layers", "--num-attention-heads", "--hidden-size", "--num-query-groups", "--vocab-size"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--seq-length"),
    *("--sglang-pp-size", "--sglang-dp-size", "--sglang-ep-size", "--sglang-context-length", "--moe-router-topk"),
    *("--recompute-num-layers", "--make-vocab-size-divisible-by", "--lr-warmup-fraction", "--min-lr"),
)
NUMBERS = [flag.name for group in GROUPS for flag in group.flags if flag.type in (int, float) and not flag.nargs]


def test_a_legal_command_line_has_no_problems(case):
    reading = case.reading()
    assert (reading.problems, reading.differences) == ([], [])
    assert reading.args == case.args().replace(log_dir=reading.args.log_dir)


def test_unsupported_flags_and_values_keep_what_they_say(case):
    """A plan shows the run that was asked for, not one with the flags of later versions taken out."""
    reading = case.reading("--use-opd", "--async-save", update_weight_mode="delta")
    refused = {problem.flags[0] for problem in reading.problems if problem.kind == "unsupported"}
    assert refused >= {"--use-opd", "--async-save", "--update-weight-mode"}
    assert reading.args.use_opd is True and reading.args.async_save is True
    assert reading.args.update_weight_mode == "delta"
    assert "--async-save" in reading.args.megatron_argv


def test_broken_rules_are_told_from_unsupported_ones(case):
    reading = case.reading("--use-opd", rollout_temperature=0)
    by_flag = {problem.flags[0]: problem.kind for problem in reading.problems}
    assert by_flag["--use-opd"] == "unsupported" and by_flag["--rollout-temperature"] == "rule"


def test_an_unknown_flag_does_not_hide_the_rest(case):
    reading = case.reading("--no-such-flag", "7", lr=0.5)
    assert "--no-such-flag: unknown flag" in "\n".join(map(str, reading.problems))
    assert reading.args.lr == 0.5 and reading.args.world_size == 2


def test_every_value_that_cannot_be_read_is_told_at_once(case):
    """argparse ends at the first value that is no number: the second typo, and every broken rule, cost another run."""
    problems = case.reading("--seed", "--colocate=3", lr="fast", num_layers="many", rollout_temperature=0).problems
    wrong = {problem.flags for problem in problems}
    assert wrong == {(flag,) for flag in ("--lr", "--num-layers", "--seed", "--colocate", "--rollout-temperature")}
    text = "\n".join(map(str, problems))
    assert "--lr: invalid float value: 'fast'" in text and "--seed: expected one argument" in text
    assert "--rollout-temperature: is 0" in text


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_what_is_no_number_breaks_a_rule(case, number):
    """`nan <= 0` is false, so that a temperature of nan passed every bound, and the engines sampled from nothing."""
    for flag in ("--rollout-temperature", "--lr", "--rotary-percent", "--optimizer-offload-fraction"):
        problems = case.reading(f"{flag}={number}").problems
        assert [str(problem) for problem in problems] == [f"{flag}: is {number}, must be a finite number"]


@pytest.mark.parametrize("flag", ["--freeze-params-name-list", "--only-train-params-name-list"])
def test_a_broken_pattern_is_a_sentence(case, flag):
    """The plan, and later every trainer, ended in a stack trace of the regular expression compiler."""
    reading = case.reading(flag, "[", r"layers\.0")
    (problem,) = reading.problems
    assert (
        str(problem).startswith(f"{flag}: '[' is no regular expression: unterminated")
        and problem.try_ == rf"{flag} '\['"
    )
    assert getattr(reading.args, flag[2:].replace("-", "_")) == [r"layers\.0"]


@pytest.mark.parametrize("flag", ["--dsa-kernel-backend tilelang", "--dsa-indexer-loss-coeff 1"])
def test_no_tensor_parallel_rank_is_a_problem_like_others(case, flag):
    """Heads were divided by a number that is reported as illegal elsewhere."""
    options = "--multi-latent-attention --kv-lora-rank 512 --qk-pos-emb-head-dim 64 --dsa-indexer-topk 2048"
    options += f" --experimental-attention-variant dsa --bf16 --tensor-model-parallel-size 0 {flag}"
    problems = case.reading(*options.split(), "--accelerator", "cuda", dry_run=True).problems
    assert any("--tensor-model-parallel-size" in problem.flags for problem in problems)


@pytest.mark.parametrize("flag", LIMITS)
def test_a_slip_of_the_keyboard_does_not_keep_the_reading_busy(case, flag):
    """Lists as long as a number of stages, and the divisors of a number of heads, took for ever."""
    option = "--" + flag.replace("_", "-")
    problems = case.reading(option, "99999999999999999999999", "--accelerator", "cuda").problems
    assert (option,) in [problem.flags for problem in problems if "must be at most" in problem.says]


def test_an_illegal_sampling_value_is_one_problem(case):
    """Evaluation data sets take it over: the same mistake was told again for each of them, under another flag."""
    case.flags |= {"--eval-prompt-data": "aime", "--eval-interval": "1"}
    more = ("--eval-prompt-data", "aime", str(case.directory / "train.jsonl"))
    for flag in ("--rollout-temperature=-1", "--eval-temperature=-0.5", "--n-samples-per-eval-prompt=0"):
        problems = case.reading(*more, flag).problems
        assert [problem.flags for problem in problems if problem.kind == "rule"] == [(flag.split("=")[0],)]


def test_a_plan_is_for_gpus_unless_said_otherwise(case):
    """On a laptop without a GPU `--accelerator auto` would plan a CPU run of 256 GPUs, in 32-bit floats."""
    planned = case.reading(dry_run=True, accelerator="auto").args
    assert (planned.accelerator, planned.distributed_backend, planned.bf16) == ("cuda", "nccl", True)
    assert case.reading(dry_run=True, accelerator="cpu").args.accelerator == "cpu"


@pytest.mark.parametrize("mode", [(), ("--colocate",), ("--debug-rollout-only",)], ids=" ".join)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_no_number_breaks_the_reading(case, value, mode):
    """Sizes are divided by each other when values are derived and checked; 0 is a problem there, not a stack trace."""
    reports = {}
    for flag in (*NUMBERS, *UPSTREAM_SIZES):
        try:
            reading = read_args(case.argv(*mode, flag, value), environ={})
        except (ArithmeticError, TypeError, ValueError) as error:
            reports[flag] = repr(error)
        else:
            assert all(isinstance(problem, Problem) for problem in reading.problems)
    assert not reports


def test_a_flag_given_twice_takes_the_last_value_and_says_so(case):
    reading = case.reading("--lr", "0.1", "--lr=0.2", "--colocate", "--colocate", "--clip-grad", "3", "--clip-grad=3")
    assert reading.args.lr == 0.2
    assert [notice for notice in reading.notices if "once" in notice] == [
        "given more than once, the last wins: --lr 0.1, then --lr 0.2"
    ]
    model_file_and_launcher = ("--moe-token-dispatcher-type", "alltoall", "--moe-token-dispatcher-type", "flex")
    notices = case.reading(*model_file_and_launcher).notices
    assert not [notice for notice in notices if "once" in notice], "a model's recipe is there to be overruled"


def test_both_names_of_one_setting_are_noticed(case):
    """The older name of an SGLang flag sets the same field: the last of the two wins, whichever it is."""
    more = ("--sglang-cuda-graph-max-bs-decode", "8", "--sglang-cuda-graph-max-bs", "16")
    reading = case.reading(*more)
    assert reading.args.sglang_overrides == {"cuda_graph_max_bs_decode": 16}
    assert (
        "given more than once, the last wins: " + " ".join(more[:2]) + ", then " + " ".join(more[2:])
        in reading.notices
    )


@pytest.mark.parametrize(
    ("tokens", "overrides", "notice"),
    [
        (
            ("--sglang-nsa-prefill-backend", "flashmla_sparse"),
            {"dsa_prefill_backend": "flashmla_sparse"},
            "--sglang-nsa-prefill-backend is deprecated: use --sglang-dsa-prefill-backend",
        ),
        (
            ("--sglang-attention-backend", "nsa"),
            {"attention_backend": "nsa"},
            "--sglang-attention-backend nsa is deprecated: use dsa",
        ),
        (
            ("--sglang-tool-call-parser", "glm45"),
            {"tool_call_parser": "glm45"},
            "--sglang-tool-call-parser glm45 is deprecated: use glm",
        ),
        (
            ("--sglang-grpc-mode",),
            {"grpc_mode": True},
            "--sglang-grpc-mode is deprecated: use --sglang-smg-grpc-mode",
        ),
        (
            ("--sglang-enable-flashinfer-allreduce-fusion",),
            {"enable_flashinfer_allreduce_fusion": True},
            "--sglang-enable-flashinfer-allreduce-fusion is deprecated: "
            "use --sglang-flashinfer-allreduce-fusion-backend=auto",
        ),
        (("--sglang-attention-backend", "dsa"), {"attention_backend": "dsa"}, None),
    ],
)
def test_what_sglang_calls_deprecated_works_with_a_notice(case, tokens, overrides, notice):
    reading = case.reading(*tokens)
    assert reading.args.sglang_overrides == overrides
    assert [text for text in reading.notices if "deprecated" in text] == ([notice] if notice else [])


def test_a_flag_that_scripts_pass_and_nothing_needs_is_accepted_with_a_notice(case):
    notices = case.reading("--use-gated-attention").notices
    assert any(notice.startswith("--use-gated-attention is deprecated: it changes nothing") for notice in notices)


@pytest.mark.parametrize("tokens", [["--help"], ["--help", "all"], ["--rolout-shuffle"], ["--accelerator", "auto"]])
def test_help_a_typo_and_a_reading_take_seconds(tokens):
    """The three parsers behind the tables take half a minute to import."""
    code = "import sys, slime.utils.arguments as a; a.parse_args(sys.argv[1:])"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, *tokens], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if "--help" in tokens else 2), done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3  # whatever else the machine does
