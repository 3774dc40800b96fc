"""Reading the command line: unknown and unsupported flags, token ownership, the frozen result, the entry point."""

import copy
import pickle
import subprocess
import sys
import time

import pytest

from slime.utils.arguments import Args, ArgumentsError, build_args, parse_args


def test_legal_command_line_is_accepted(case):
    args = case.args()
    assert isinstance(args, Args)
    assert (args.rollout_batch_size, args.n_samples_per_prompt, args.global_batch_size) == (8, 4, 32)
    assert args.prompt_data.endswith("train.jsonl")


def test_unknown_flag_names_the_nearest_known_ones(case):
    text = case.only_problem("--rolout-shufle")
    assert "--rolout-shufle: unknown flag" in text and "--rollout-shuffle" in text


def test_unknown_flag_with_a_value_is_one_problem(case):
    assert "--rollout-temprature" in case.only_problem("--rollout-temprature=0.5")
    assert "--rollout-temperature" in case.only_problem("--rollout-temprature", "0.5")


def test_stray_values_are_refused(case):
    text = case.only_problem("--rollout-shuffle", "extra")
    assert "extra" in text


@pytest.mark.parametrize(
    "short", ["--rollout-shuf", "--load-debug", "--sglang-mem-fraction", "--tensor-model-parallel"]
)
def test_abbreviations_are_refused(case, short):
    assert f"{short}: unknown flag" in case.only_problem(short)


def test_load_is_not_taken_for_load_debug_rollout_data(case):
    args = case.args(load=case.megatron_checkpoint("ckpt"))
    assert args.load_debug_rollout_data is None
    assert args.debug_train_only is False


@pytest.mark.parametrize(
    "flag", ["--use-opd", "--use-fault-tolerance", "--release-train", "--keep-old-actor", "--use-routing-replay"]
)
def test_flag_of_a_later_version_is_refused(case, flag):
    problems = [problem for problem in case.problems(flag) if problem.kind == "unsupported"]
    assert [str(problem).split(" by")[0] for problem in problems] == [f"{flag}: is not supported yet"]


def test_value_of_a_later_version_is_refused_with_the_legal_ones(case):
    (text,) = [str(p) for p in case.problems(update_weight_mode="delta") if p.kind == "unsupported"]
    assert "delta is not supported yet" in text and "try: --update-weight-mode full" in text
    assert case.args(update_weight_mode="full").update_weight_mode == "full"


def test_flag_that_slime_sets_for_engines_says_what_decides_it(case):
    text = case.only_problem("--sglang-tp-size", "2")
    assert "--rollout-num-gpus-per-engine" in text


def test_all_problems_are_reported_together(case):
    changed = {"rollout_temperature": 0, "use_kl_loss": True, "global_batch_size": 256}
    problems = case.problems("--no-such-flag", "--use-fault-tolerance", **changed)
    expected = {
        "--no-such-flag",
        "--use-fault-tolerance",
        "--rollout-temperature",
        "--ref-load",
        "--global-batch-size",
    }
    assert {flag for problem in problems for flag in problem.flags} >= expected
    assert len(problems) == len(set(problems)), problems


def test_wrong_type_names_flag_and_value(case):
    text = case.only_problem(rollout_batch_size="eight")
    assert "--rollout-batch-size" in text and "eight" in text


def test_wrong_choice_lists_the_legal_ones(case):
    text = case.only_problem(kl_loss_type="k9")
    assert "--kl-loss-type" in text and "k9" in text and "low_var_kl" in text


def test_megatron_argv_holds_exactly_megatrons_tokens_in_order(case):
    argv = [
        *(
            "--num-layers",
            "6",
            "--colocate",
            "--lr=3e-5",
            "--moe-layer-freq",
            "[0]*3+[1]*3",
            "--sglang-log-level",
            "warning",
        ),
        *("--rollout-stop", "a b", "--min-lr", "-1", "--recompute-modules", "mlp", "core_attn", "--rollout-shuffle"),
        *("--recompute-granularity", "selective"),
        *("--wandb-exp-name", "--a b", "--router-policy", "random", "--accelerator", "cpu", "--save", "out"),
    ]
    with pytest.raises(ArgumentsError):  # far from complete, but the tokens are read all the same
        build_args(argv, environ={})
    args = case.args(*argv)
    mine = args.megatron_argv[-len(_MEGATRON_TOKENS) :]
    assert mine == _MEGATRON_TOKENS
    slime_only = {
        "--colocate",
        "--rollout-stop",
        "--rollout-shuffle",
        "--accelerator",
        "--hf-checkpoint",
        "--prompt-data",
    }
    assert not slime_only & set(args.megatron_argv)
    assert args.moe_layer_freq == "[0]*3+[1]*3"  # Megatron's own parser reads this type, in the trainer


_MEGATRON_TOKENS = [
    *("--num-layers", "6", "--lr=3e-5", "--moe-layer-freq", "[0]*3+[1]*3", "--min-lr", "-1"),
    *("--recompute-modules", "mlp", "core_attn", "--recompute-granularity", "selective"),
    *("--wandb-exp-name", "--a b", "--save", "out"),
]


def test_sglang_overrides_are_exactly_what_the_user_gave(case):
    args = case.args(
        *("--sglang-mem-fraction-static", "0.5", "--sglang-context-length", "4k", "--sglang-disable-cuda-graph"),
        *("--sglang-chunked-prefill-size", "-1", "--sglang-log-level", "warning", "--sglang-server-concurrency", "9"),
        *("--sglang-json-model-override-args", '{"a": 1}', "--sglang-prefill-round-robin-balance"),
    )
    assert args.sglang_overrides == {
        "mem_fraction_static": 0.5,
        "context_length": 4000,
        "disable_cuda_graph": True,
        "chunked_prefill_size": -1,
        "log_level": "warning",
        "json_model_override_args": '{"a": 1}',
    }
    assert args.sglang_mem_fraction_static == 0.5
    assert args.sglang_max_running_requests is None  # a default of SGLang's, not the user's
    assert args.sglang_server_concurrency == 9


def test_sglang_attributes_exist_without_engines(case):
    args = case.args("--debug-train-only")
    assert args.sglang_router_ip is None and args.sglang_dp_size == 1 and args.sglang_overrides == {}


def test_deprecated_sglang_flag_reaches_the_current_field_with_a_notice(case, caplog):
    args = case.args("--sglang-cuda-graph-max-bs", "16")
    assert args.sglang_overrides == {"cuda_graph_max_bs_decode": 16}
    assert "--sglang-cuda-graph-max-bs is deprecated: use --sglang-cuda-graph-max-bs-decode" in caplog.text


def test_router_overrides_hold_slimes_defaults_and_the_users_values(case):
    defaults = {"log_level": "warn", "balance_abs_threshold": 10, "balance_rel_threshold": 1.2}
    assert case.args().router_overrides == defaults
    args = case.args("--router-policy", "round_robin", "--router-log-level", "info", "--router-tls-cert-path", "x.pem")
    assert args.router_overrides == {
        **defaults,
        "policy": "round_robin",
        "log_level": "info",
        "server_cert_path": "x.pem",
    }


def test_arguments_are_read_only(case):
    args = case.args()
    with pytest.raises(AttributeError, match="args.replace"):
        args.lr = 1.0
    with pytest.raises(AttributeError, match="read-only"):
        del args.lr
    changed = args.replace(lr=1.0, new=2)
    assert (changed.lr, changed.new, args.lr) == (1.0, 2, 1e-6)
    assert not hasattr(args, "new")


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_arguments_survive_copying_and_stay_read_only(case, clone):
    args = case.args()
    twin = clone(args)
    assert twin == args and isinstance(twin, Args)
    with pytest.raises(AttributeError):
        twin.lr = 1.0


def test_custom_arguments_are_parsed_and_lose_clashes(case):
    def add(parser):
        parser.add_argument("--my-plugin-size", type=int, default=3)
        parser.add_argument("--rollout-batch-size", type=str, default="theirs")
        return parser

    args = build_args(case.argv("--my-plugin-size", "5"), add_custom_arguments=add, environ={})
    assert args.my_plugin_size == 5 and args.rollout_batch_size == 8
    assert "--my-plugin-size" not in args.megatron_argv
    assert build_args(case.argv(), add_custom_arguments=add, environ={}).my_plugin_size == 3


def test_entry_point_prints_the_problems_and_exits_with_2(case, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(case.argv("--rolout-shuffle"))
    assert caught.value.code == 2
    assert "--rollout-shuffle" in capsys.readouterr().err


@pytest.mark.parametrize("topic", [(), ("rollout",), ("megatron",), ("all",), ("temperature",)])
def test_help_prints_and_exits_with_0(capsys, topic):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help", *topic])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert ("--num-layers" in shown) == (topic in (("megatron",), ("all",)))
    assert ("--rollout-temperature" in shown) == (topic != ("megatron",))


def test_help_of_something_unknown_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help", "nosuchword"])
    assert caught.value.code == 2


def test_import_is_light_and_help_is_fast(case):
    heavy = "torch megatron sglang ray transformers numpy mbridge pyarrow sympy"
    code = (
        "import sys, slime.utils.arguments as a\n"
        "try: a.parse_args(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print([m for m in '{heavy}'.split() if m in sys.modules], file=sys.stderr)"
    )
    for argv in (["--help"], case.argv()):
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
        assert done.stderr.strip().endswith("[]"), done.stderr
        assert time.monotonic() - start < 3
