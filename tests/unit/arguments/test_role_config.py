"""--megatron-config-path: settings of one training role, with their flags' types, before anything is derived."""

import pytest


def config(case, text: str) -> str:
    file = case.directory / "roles.yaml"
    file.write_text(text)
    return str(file)


def actor(case, overrides: str) -> str:
    return config(case, f"megatron:\n  - name: policy\n    role: actor\n    overrides: {overrides}\n")


def test_the_actors_values_win_and_others_follow_from_them(case):
    """Values used to be set after the derived ones, so that eps_clip_high kept the command line's eps_clip."""
    args = case.args(eps_clip=0.1, lr=1e-5, megatron_config_path=actor(case, "{lr: 3e-6, eps_clip: 0.4}"))
    assert (args.lr, args.eps_clip, args.eps_clip_high) == (3e-6, 0.4, 0.4)


def test_text_numbers_take_the_flags_type(case):
    """YAML reads 1e-5 as text, having no dot; an optimizer given text fails at its first step."""
    args = case.args(megatron_config_path=actor(case, "{lr: 1e-5, weight_decay: 1, micro_batch_size: '4'}"))
    assert args.lr == 1e-5 and isinstance(args.lr, float)
    assert args.weight_decay == 1.0 and isinstance(args.weight_decay, float)
    assert args.micro_batch_size == 4


def test_lists_reach_megatrons_own_parser(case):
    overrides = "{recompute_granularity: selective, recompute_modules: [mlp, core_attn]}"
    args = case.args(megatron_config_path=actor(case, overrides))
    assert args.megatron_argv[-3:] == ["--recompute-modules", "mlp", "core_attn"]
    assert args.recompute_granularity == "selective"


def test_args_is_another_word_for_overrides(case):
    text = "megatron:\n  - {name: a, role: actor, args: {clip-grad: 0.5}}\n"
    assert case.args(megatron_config_path=config(case, text)).clip_grad == 0.5


def test_the_file_wins_over_the_custom_config(case):
    other = case.directory / "custom.yaml"
    other.write_text("lr: 0.25\nclip_grad: 0.25\n")
    args = case.args(custom_config_path=other, megatron_config_path=actor(case, "{lr: 0.5}"))
    assert (args.lr, args.clip_grad) == (0.5, 0.25)


@pytest.mark.parametrize("text", ["megatron: []\n", "megatron:\n  - {name: a, role: actor}\n"])
def test_a_role_without_entry_keeps_the_command_line(case, text):
    assert case.args(lr=0.5, megatron_config_path=config(case, text)).lr == 0.5


def test_numbers_of_gpus_in_older_files_are_named_as_without_effect(case, caplog):
    args = case.args(megatron_config_path=actor(case, "{num_nodes: 9, num_gpus_per_node: 9}"))
    assert args.num_gpus_per_node == 8
    assert "num_nodes has no effect" in caplog.text and "num_gpus_per_node has no effect" in caplog.text


def test_an_entry_for_a_critic_that_is_not_trained_is_named(case, caplog):
    text = "megatron:\n  - {name: v, role: critic, overrides: {lr: 1e-5}}\n"
    assert case.args(megatron_config_path=config(case, text)).critic_args is None
    assert "the critic's entry has no effect: --advantage-estimator grpo trains no critic" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "one key, `megatron`"),
        ("megatron: {role: actor}\n", "one key, `megatron`"),
        ("megatron: []\ncritic: {lr: 1}\n", "found megatron, critic"),
        ("megatron:\n  - actor\n", "entry 1 must hold name, role, overrides"),
        ("megatron:\n  - {role: actr}\n", "role 'actr', must be actor or critic"),
        ("megatron:\n  - {overrides: {lr: 1.0}}\n", "role None"),
        ("megatron:\n  - {role: actor, overides: {}}\n", "unknown key 'overides'; the nearest known: overrides"),
        ("megatron:\n  - {role: actor}\n  - {role: actor}\n", "2 entries for the actor"),
        ("megatron:\n  - {role: actor, args: {}, overrides: {}}\n", "both overrides and args"),
        ("megatron:\n  - {role: actor, overrides: [lr]}\n", "`name: value` lines"),
        ("megatron: [", "cannot read"),
    ],
)
def test_a_file_of_another_form_is_one_problem_that_names_it(case, text, expected):
    problem = case.only_problem(megatron_config_path=config(case, text))
    assert expected in problem and "roles.yaml" in problem and problem.startswith("--megatron-config-path")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("{lerning_rate: 1}", "lerning_rate: is no setting of a training role"),
        ("{clip_grd: 1}", "the nearest known: clip_grad"),
        ("{rollout_temperature: 0.5}", "rollout_temperature: is no setting of a training role"),
        ("{sglang_mem_fraction_static: 0.5}", "is no setting of a training role"),
        ("{lr: fast}", "lr: "),
        ("{colocate: true}", "is no setting"),
        ("{use_routing_replay: true}", "not supported yet"),
        ("{lr: -1, micro_batch_size: 2.5}", "takes int"),
    ],
)
def test_a_bad_setting_names_file_and_key(case, overrides, expected):
    problems = "\n".join(map(str, case.problems(megatron_config_path=actor(case, overrides))))
    assert expected in problems and "roles.yaml" in problems


def test_missing_file(case):
    assert "nowhere.yaml" in case.only_problem(megatron_config_path="nowhere.yaml")
