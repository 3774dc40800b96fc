"""Plug-ins are found and held against how they are called, without running a line of them."""

import ast
import importlib
import inspect
import sys

import pytest

from slime.utils.arguments.checks import hooks
from slime.utils.arguments.checks.hook_calls import CALLS, Call
from slime.utils.arguments.checks.source import NotFound, find, module_spec
from slime.utils.arguments.groups import GROUPS
from tests.helpers.rules import Rule, check_rule, each_rule, rule_name

GENERATE, REWARD = "--custom-generate-function-path", "--custom-rm-path"
SOURCE = """
import functools
raise SystemExit("this file must not be run")
async def play(args, sample, sampling_params, evaluation=False): ...
def plain(args, sample, sampling_params): return sample
async def short(args, sample): ...
async def keywords(*args, **kwargs): ...
async def extra(args, sample, sampling_params, depth): ...
async def score(args, sample, **kwargs): return 1.0
def made(args, sample): return score(args, sample)
def number(args, sample): return float(sample.label == "1")
async def filter_async(args, group): ...
def keep(args, group, **kwargs): return True
def tis(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks): ...
def provider(pre_process, post_process): ...
def provider_by_position(pre_process, /, post_process): ...
@functools.cache
def decorated(whatever): ...
assigned = functools.partial(play)
class Player: ...
class Source:
    def __init__(self, args): ...
    def get_samples(self, num_samples): ...
    def add_samples(self, samples): ...
    def save(self, rollout_id): ...
class Whole(Source):
    def load(self, rollout_id=None): ...
class Greedy(Source):
    def get_samples(self): ...
"""
RULES = {
    hooks.check_hooks: (
        Rule(
            f"{GENERATE} {{dir}}/agent.py:play_",
            ("has no 'play_'; the nearest it has: play", "agent.py:play"),
            f"{GENERATE} {{dir}}/agent.py:play",
        ),
        Rule(f"{GENERATE} {{dir}}/none.py:play", ("none.py does not exist",), kind="absent"),
        Rule(f"{REWARD} no_such_package.rewards.score", ("No module named 'no_such_package'",), kind="absent"),
        Rule(f"{REWARD} score", ("names no module", "try: --custom-rm-path package.module.name"), kind="absent"),
        Rule(
            f"{GENERATE} {{dir}}/agent.py:short",
            (
                "short(args, sample) is called as f(args, sample, sampling_params): 3 values by position",
                "try: async def short(args, sample, sampling_params[, evaluation])",
            ),
            f"{GENERATE} {{dir}}/agent.py:keywords",
        ),
        Rule(f"{GENERATE} {{dir}}/agent.py:extra", ("nothing is passed for depth",)),
        Rule(
            f"{GENERATE} {{dir}}/agent.py:plain", ("plain is awaited, and is no `async def`", "try: async def plain")
        ),
        Rule(f"{GENERATE} {{dir}}/agent.py:Player", ("is a class",), f"{GENERATE} {{dir}}/agent.py:assigned"),
        Rule(
            f"{REWARD} {{dir}}/agent.py:number",
            ("number is awaited, and is no `async def`",),
            f"{REWARD} {{dir}}/agent.py:made",
        ),
        Rule(
            "--dynamic-sampling-filter-path {dir}/agent.py:filter_async",
            ("is an `async def`, and its result is used without awaiting it",),
            "--dynamic-sampling-filter-path {dir}/agent.py:keep",
        ),
        Rule("--custom-tis-function-path {dir}/agent.py:tis", ("it takes no total_lengths",), also="--use-tis"),
        Rule(
            "--custom-model-provider-path {dir}/agent.py:provider_by_position",
            ("it takes no pre_process",),
            "--custom-model-provider-path {dir}/agent.py:provider",
        ),
        Rule(f"{GENERATE} {{dir}}/broken.py:play", ("broken.py:1: ",)),
        Rule(
            "--rollout-sample-hook-path {dir}/agent.py:score --rollout-sample-hook-path {dir}/agent.py:nothing",
            ("has no 'nothing'",),
            "--rollout-sample-hook-path {dir}/agent.py:score",
        ),
        Rule(
            "--data-source-path {dir}/agent.py:Source",
            ("agent.py:Source has no method load",),
            "--data-source-path {dir}/agent.py:Whole",
        ),
        Rule(
            "--data-source-path {dir}/agent.py:Greedy", ("Greedy.get_samples", "1 values by position, and it takes 0")
        ),
        Rule(
            "--eval-config {dir}/eval.yaml",
            ("--eval-config: held: custom_rm_path ", "has no 'grade'"),
            "--eval-config {dir}/fine.yaml",
            also="--eval-interval 1",
        ),
    ),
    hooks.check_spec: (
        Rule("--spec json", ("json: takes the name of a module and of a function in it",), "--spec layers layer_spec"),
        Rule("--spec no_such.models get_spec", ("No module named 'no_such'",), kind="absent"),
        Rule("--spec slime_plugins.models.none get_spec", ("No module named",), kind="unsupported"),
        Rule(
            "--spec layers short_spec",
            ("layers.short_spec(args, config) is called as f(args, config, vp_stage)",),
            "--spec layers layer_spec",
        ),
    ),
}


@pytest.fixture(autouse=True)
def agent(case, monkeypatch):
    (case.directory / "layers.py").write_text(
        "def short_spec(args, config): ...\ndef layer_spec(args, config, vp_stage=None): ..."
    )
    monkeypatch.syspath_prepend(case.directory)
    (case.directory / "agent.py").write_text(SOURCE)
    (case.directory / "broken.py").write_text("def play(:")
    for name, function in (("eval", "grade"), ("fine", "score")):
        path, function = f"'{case.directory}/train.jsonl'", f"'{case.directory}/agent.py:{function}'"
        data = f"{{name: held, path: {path}, custom_rm_path: {function}}}"
        (case.directory / f"{name}.yaml").write_text(f"datasets: [{data}]")


@pytest.mark.parametrize(("check", "rule"), each_rule(RULES), ids=rule_name)
def test_rule(case, check, rule):
    check_rule(case, check, rule)


def test_every_plug_in_flag_has_a_call():
    """A new hook without an entry here would only fail when it is first called."""
    paths = {flag.dest for group in GROUPS for flag in group.flags if flag.dest.endswith("_path")}
    settings = {"custom_config_path", "megatron_config_path", "data_source_path"}
    assert set(CALLS) == paths - settings


def test_the_built_in_functions_can_be_called_as_hooks_are():
    """What the table says is how the code calls: its own defaults fit."""
    for path, dest in (
        ("slime.rollout.sglang_rollout.generate_rollout", "rollout_function_path"),
        ("slime.rollout.sft_rollout.generate_rollout", "rollout_function_path"),
        ("slime.rollout.sglang_rollout.generate", "custom_generate_function_path"),
        ("slime.rollout.data_source.pop_first", "buffer_filter_path"),
        ("slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", "dynamic_sampling_filter_path"),
        ("slime.backends.megatron_utils.loss.corrections.icepop_function", "custom_tis_function_path"),
        ("slime.backends.megatron_utils.loss.vanilla_tis_function", "custom_tis_function_path"),
    ):
        definition = find(path).definition
        assert definition is not None and hooks.mismatch(definition.args, CALLS[dest]) == "", path
    source = find("slime.rollout.data_source.RolloutDataSourceWithBuffer")
    assert source.definition.name == "RolloutDataSourceWithBuffer"


SIGNATURES = [
    "",
    "a",
    "a, b",
    "a, b=1",
    "a, /, b",
    "*a",
    "a, *, b",
    "a, *, b=1",
    "**k",
    "a, b, **k",
    "a, b, c",
    "*, a, b",
]


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("call", [Call(("x",)), Call(("x", "y")), Call(("x",), ("b",)), Call((), ("a", "b"))], ids=str)
def test_a_call_fits_where_python_says_so(signature, call):
    """The arithmetic on syntax trees agrees with Python's own binding."""
    namespace: dict = {}
    exec(f"def f({signature}): ...", namespace)
    try:
        inspect.signature(namespace["f"]).bind(*call.names, **dict.fromkeys(call.keywords))
        fits = True
    except TypeError:
        fits = False
    declared = ast.parse(f"def f({signature}): ...").body[0].args
    assert (hooks.mismatch(declared, call) == "") == fits, hooks.mismatch(declared, call)


def test_nothing_is_imported(tmp_path, monkeypatch):
    """Python's own search for a package's module imports the package, and with it whatever that starts."""
    package = tmp_path / "loud_package" / "inner"
    package.mkdir(parents=True)
    for directory in (package.parent, package):
        (directory / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "rewards.py").write_text("from .grading import score as grade\nfrom . import hidden")
    (package / "grading.py").write_text("async def score(args, sample): ...")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert find("loud_package.inner.rewards.grade").definition.name == "score"
    assert not [name for name in sys.modules if name.startswith("loud_package")]
    assert module_spec("loud_package.outer") is None
    with pytest.raises(NotFound, match="has no 'other'"):
        find("loud_package.inner.rewards.other")


def test_folders_without_an_init_file_are_packages_too(tmp_path, monkeypatch):
    """Two of them, one inside the other, ended a launch with KeyError: Python wants the outer one imported."""
    folder = tmp_path / "quiet_outer" / "inner" / "innermost"
    folder.mkdir(parents=True)
    (folder / "rewards.py").write_text("async def score(args, sample): ...")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert find("quiet_outer.inner.innermost.rewards.score").definition.name == "score"
    with pytest.raises(NotFound, match="No module named 'quiet_outer.inner.other'"):
        find("quiet_outer.inner.other.rewards.score")
    with pytest.raises(NotFound, match="has no 'nothing'"):
        find("quiet_outer.inner.innermost.rewards.nothing")


@pytest.mark.parametrize("name", ["decorated", "assigned"])
def test_what_only_running_would_show_is_said(case, caplog, name):
    case.args("--custom-loss-function-path", f"{case.directory}/agent.py:{name}", "--loss-type", "custom_loss")
    assert (
        f"agent.py:{name} is called as f(args, batch, logits, sum_of_sample_mean), which could not be" in caplog.text
    )


def test_a_plain_function_that_hands_on_a_coroutine_is_let_through_with_a_word(case, caplog):
    case.args(REWARD, f"{case.directory}/agent.py:made")
    assert "agent.py:made is awaited, and is no `async def`" in caplog.text
