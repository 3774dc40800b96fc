"""The checks as a whole: each has a case that breaks it, none changes anything, and all of them together are quick."""

import random
import time
from collections import Counter

import test_checks_algorithm
import test_checks_batch
import test_checks_engines
import test_checks_experts
import test_checks_files
import test_checks_hooks
import test_checks_model
import test_checks_training

from slime.utils.arguments.checks import engines, experts, parallel, resources
from slime.utils.arguments.checks.common import round_up
from slime.utils.arguments.validate import CHECKS, validate
from slime.utils.layout.divisors import divisors, largest_divisor
from tests.helpers.rules import MANY_GPUS, given

TABLES = (
    test_checks_batch.RULES,
    test_checks_algorithm.RULES,
    test_checks_model.RULES,
    test_checks_experts.RULES,
    test_checks_training.RULES,
    test_checks_engines.RULES,
    test_checks_files.RULES,
    test_checks_hooks.RULES,
)


def test_every_check_is_broken_by_some_case():
    """A check that no test can break checks nothing; a case of a check that nobody runs tests nothing."""
    tested = {check for table in TABLES for check in table}
    assert sorted(check.__name__ for check in set(CHECKS) - tested) == ["check_described"]
    assert tested <= set(CHECKS)


def test_every_check_says_what_it_holds():
    names = [check.__name__ for check in CHECKS]
    assert len(set(names)) == len(names) and all(check.__doc__ for check in CHECKS)


def test_checks_change_nothing(case):
    """An assignment to the read-only arguments would raise."""
    args, options = case.args(), given(case.argv())
    for check in CHECKS:
        assert list(check(args, options)) == []


def test_all_checks_take_a_fifth_of_a_second_at_most(case, monkeypatch):
    """The checks run at each start and, hundreds of times, in the search for a layout that fits."""
    from tests.helpers.model_configs import CONFIGS

    case.hf.joinpath("config.json").write_text(CONFIGS["glm5.2-744B-A40B"].read_text())
    flags = {**{flag: case.flags[flag] for flag in ("--hf-checkpoint", "--prompt-data", "--num-rollout")}, **MANY_GPUS}
    argv = [token for flag, value in flags.items() for token in ((flag,) if value is None else (flag, value))]
    argv += ["--rollout-batch-size", "8", "--rollout-max-response-len", "16", "--pipeline-model-parallel-size", "8"]
    from slime.utils.arguments import read_args

    args, options = read_args(argv, environ={}).args, given(argv)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert validate(args, options, ())
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2, times


SIZES = {
    "--actor-num-nodes": (1, 2, 3, 32),
    "--actor-num-gpus-per-node": (4, 6, 8),
    "--tensor-model-parallel-size": (1, 2, 3, 4, 6, 8, 16),
    "--pipeline-model-parallel-size": (1, 2, 3, 5, 8),
    "--context-parallel-size": (1, 2, 3, 4),
    "--expert-model-parallel-size": (1, 2, 5, 8, 32),
    "--expert-tensor-parallel-size": (None, 1, 2, 3),
    "--num-attention-heads": (12, 20, 64),
    "--num-query-groups": (2, 4, 5),
    "--num-experts": (8, 60, 128),
    "--moe-ffn-hidden-size": (20, 768),
    "--ffn-hidden-size": (96, 100),
    "--moe-router-topk": (2, 9),
    "--rollout-num-gpus": (8, 12, 48),
    "--rollout-num-gpus-per-engine": (1, 3, 8, 12, 16),
    "--sglang-dp-size": (1, 2, 3),
    "--sglang-ep-size": (1, 3, 4),
}
SIZED = (
    parallel.check_world,
    parallel.check_heads,
    parallel.check_widths,
    experts.check_experts,
    experts.check_router,
    resources.check_rollout_gpus,
    engines.check_engine_parallel,
    engines.check_engine_experts,
    engines.check_engine_split,
)


def test_a_legal_value_that_is_named_is_legal(case):
    """Over hundreds of random sizes: who follows the advice of a check is not told off again by it about that flag."""
    base = case.args().replace(hf_config={}, add_bias_linear=False, sglang_enable_dp_attention=True, kv_channels=4)
    draw, followed = random.Random(7), Counter()
    for _ in range(400):
        sizes = {flag: draw.choice(values) for flag, values in SIZES.items()}
        for check in SIZED:
            for problem in check(sized(base, sizes), {}):
                advice = problem.try_.split(",")[0].split()
                if not advice or not advice[0].startswith("--"):
                    continue
                pairs = dict(zip(advice[::2], advice[1::2], strict=False)) if len(advice) % 2 == 0 else {}
                if not pairs or not all(value.isdecimal() for value in pairs.values()):
                    continue
                changed = sized(base, {**sizes, **{flag: int(value) for flag, value in pairs.items()}})
                before = [other for other in check(sized(base, sizes), {}) if other != problem]
                again = [other for other in check(changed, {}) if other not in before and other.flags == problem.flags]
                assert not again, f"{sizes}: {problem} -> {again[0]}"
                followed[check.__name__] += 1
    assert min(followed[check.__name__] for check in SIZED) > 10, followed


def sized(base, sizes):
    values = {flag[2:].replace("-", "_"): value for flag, value in sizes.items()}
    return base.replace(**values, world_size=values["actor_num_nodes"] * values["actor_num_gpus_per_node"])


def test_a_missing_required_flag_is_named(case):
    text = case.only_problem(without=("--rollout-batch-size",))
    assert "--rollout-batch-size: is required: Prompts per rollout." in text


def test_a_model_that_nobody_describes(case):
    """Without a config.json to read and without flags, Megatron would end in an assertion without a message."""
    args = case.args().replace(num_layers=None, hf_config=None)
    (problem,) = [problem for problem in map(str, validate(args, {}, ())) if "--num-layers: is not given" in problem]
    assert "no config.json says it" in problem and "--plan-hf-config FILE" in problem


def test_rollout_only_needs_no_model(case):
    case.args("--debug-rollout-only", hidden_size=48, without=("--num-layers", "--global-batch-size"))


def test_there_is_no_dropout_unless_asked_for(case):
    """Megatron's own default is 0.1."""
    args = case.args()
    assert args.attention_dropout == args.hidden_dropout == 0.0


def test_arithmetic():
    for number in range(1, 200):
        every = [d for d in range(1, number + 1) if number % d == 0]
        assert divisors(number) == every
        assert all(largest_divisor(number, most) == max(d for d in every if d <= most) for most in range(1, 250, 7))
        assert all(round_up(number, unit) in range(number, number + unit) for unit in (1, 3, 16, 128))
    assert divisors(0) == divisors(-3) == []
