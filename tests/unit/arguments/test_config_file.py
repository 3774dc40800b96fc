"""--custom-config-path: values enter before anything is derived, with their flag's type."""

import pytest


def config(case, text: str) -> str:
    file = case.directory / "custom.yaml"
    file.write_text(text)
    return str(file)


def test_values_are_derived_from_the_file(case):
    text = "eps_clip: 0.4\nn_samples_per_prompt: 1\nglobal_batch_size: 8\nrewards_normalization: false\n"
    args = case.args(custom_config_path=config(case, text))
    assert (args.eps_clip, args.eps_clip_high) == (0.4, 0.4)
    assert args.grpo_std_normalization is False


def test_text_numbers_take_the_flags_type(case):
    args = case.args(custom_config_path=config(case, "lr: 1e-4\nentropy_coef: 1\nrollout_stop_token_ids: ['3', 4]\n"))
    assert args.lr == 1e-4 and isinstance(args.lr, float)
    assert args.entropy_coef == 1.0 and isinstance(args.entropy_coef, float)
    assert args.rollout_stop_token_ids == [3, 4]


def test_unknown_keys_become_attributes_for_plugins(case):
    args = case.args(custom_config_path=config(case, "my_plugin:\n  depth: 3\nother-key: x\n"))
    assert args.my_plugin == {"depth": 3} and args.other_key == "x"


def test_file_wins_over_the_command_line(case):
    assert case.args(lr=1e-5, custom_config_path=config(case, "lr: 0.5")).lr == 0.5


def test_engine_values_reach_the_engines(case):
    args = case.args(custom_config_path=config(case, "sglang_mem_fraction_static: 0.7\nrouter_policy: random\n"))
    assert args.sglang_overrides == {"mem_fraction_static": 0.7}
    assert args.router_overrides["policy"] == "random"


def test_text_only_megatron_can_read_reaches_its_parser(case):
    args = case.args(custom_config_path=config(case, "moe_layer_freq: '[0]*3+[1]*3'\n"))
    assert args.megatron_argv[-2:] == ["--moe-layer-freq", "[0]*3+[1]*3"]


def test_lists_reach_megatrons_parser(case):
    """Megatron takes only plain values from the attributes, so a list in the file used to change nothing."""
    text = "recompute_granularity: selective\nrecompute_modules: [mlp, core_attn]\n"
    args = case.args(custom_config_path=config(case, text))
    assert args.recompute_modules == ["mlp", "core_attn"]
    assert args.megatron_argv[-3:] == ["--recompute-modules", "mlp", "core_attn"]


def test_one_value_of_a_list_is_a_list(case):
    text = "recompute_granularity: selective\nrecompute_modules: mlp\nrollout_stop: END\n"
    args = case.args(custom_config_path=config(case, text))
    assert (args.recompute_modules, args.rollout_stop) == (["mlp"], ["END"])


def test_deprecated_names_work_with_a_notice(case, caplog):
    args = case.args(custom_config_path=config(case, "sglang_disable_cuda_graph: true\n"))
    assert args.sglang_overrides == {"disable_cuda_graph": True}
    assert "custom.yaml: sglang_disable_cuda_graph is deprecated" in caplog.text


def test_the_file_may_name_the_checkpoint_that_describes_the_model(case):
    flags = ("--hf-checkpoint", "--num-layers", "--rotary-base")
    args = case.args(without=flags, custom_config_path=config(case, f"hf_checkpoint: {case.hf}\n"))
    assert (args.num_layers, args.rotary_base) == (6, 1000000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr: fast", "lr: "),
        ("colocate: 3", "true or false"),
        ("kl_loss_type: k9", "k9"),
        ("rollout_batch_size: 2.5", "takes int"),
        ("use_opd: true", "not supported yet"),
        ("- a\n- b", "top level"),
        ("a: [", "cannot read"),
    ],
)
def test_bad_content_is_a_problem_that_names_file_and_key(case, text, expected):
    problems = "\n".join(map(str, case.problems(custom_config_path=config(case, text))))
    assert expected in problems and "custom.yaml" in problems


def test_missing_file(case):
    assert "nowhere.yaml" in case.only_problem(custom_config_path="nowhere.yaml")


def test_rules_apply_to_the_files_values(case):
    assert "--rollout-temperature" in case.only_problem(custom_config_path=config(case, "rollout_temperature: -1"))


def test_empty_file_changes_nothing(case):
    assert case.args(custom_config_path=config(case, "")).lr == 1e-6
