"""Evaluation datasets: precedence of entry, defaults and command line; wrong keys and values."""

from argparse import Namespace

import pytest

from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs, eval_datasets_from_args


def make_args(**values) -> Namespace:
    base = {
        "eval_config": None,
        "eval_prompt_data": None,
        "n_samples_per_eval_prompt": 2,
        "n_samples_per_prompt": 8,
        "eval_temperature": None,
        "rollout_temperature": 0.9,
        "eval_top_p": 0.5,
        "rollout_top_p": 1.0,
        "eval_top_k": None,
        "rollout_top_k": -1,
        "eval_max_response_len": None,
        "rollout_max_response_len": 64,
        "rollout_stop": ["</s>"],
        "rollout_stop_token_ids": None,
        "eval_min_new_tokens": None,
        "eval_input_key": None,
        "input_key": "prompt",
        "eval_label_key": "answer",
        "label_key": "label",
        "eval_tool_key": None,
        "tool_key": "tools",
        "metadata_key": "metadata",
        "multimodal_keys": None,
        "apply_chat_template": True,
        "apply_chat_template_kwargs": {},
        "custom_rm_path": None,
    }
    return Namespace(**{**base, **values})


def from_yaml(tmp_path, text: str, **values) -> list[EvalDatasetConfig]:
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    return eval_datasets_from_args(make_args(eval_config=str(path), **values))


def test_entry_beats_defaults_beats_command_line(tmp_path):
    configs = from_yaml(
        tmp_path,
        """
        eval:
          defaults: {rm_type: math, temperature: 0.6, stop: [END], max_response_len: 32}
          datasets:
            - {name: one, path: a.jsonl, temperature: 0.1, rm_type: gpqa}
            - {name: two, path: "b.jsonl@[:5]"}
        """,
    )
    one, two = configs
    assert (one.temperature, two.temperature) == (0.1, 0.6)
    assert (one.rm_type, two.rm_type) == ("gpqa", "math")
    assert (one.stop, two.stop, two.max_response_len) == (["END"], ["END"], 32)  # K26: defaults reach every dataset
    assert (one.top_p, one.top_k, one.n_samples_per_eval_prompt) == (0.5, -1, 2)
    assert (one.input_key, one.label_key, one.apply_chat_template) == ("prompt", "answer", True)
    assert two.path == "b.jsonl@[:5]"


def test_datasets_may_be_a_mapping_at_the_top_and_json(tmp_path):
    (config,) = from_yaml(tmp_path, '{"datasets": {"aime": {"path": "a.jsonl", "n_samples_per_eval_prompt": 16}}}')
    assert (config.name, config.path, config.n_samples_per_eval_prompt) == ("aime", "a.jsonl", 16)
    assert config.temperature == 0.9 and config.stop == ["</s>"]


def test_a_missing_sample_count_falls_back_twice():
    config = build_eval_dataset_configs(make_args(n_samples_per_eval_prompt=None), [{"name": "a", "path": "p"}], {})[0]
    assert config.n_samples_per_eval_prompt == 8


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.jsonl"], [("aime", "a.jsonl")]),
        (["x", "a.jsonl", "y", "b.jsonl"], [("x", "a.jsonl"), ("y", "b.jsonl")]),
        (None, []),
    ],
)
def test_prompt_data_pairs(words, expected):
    configs = eval_datasets_from_args(make_args(eval_prompt_data=words))
    assert [(c.name, c.path) for c in configs] == expected


def test_prompt_data_that_does_not_pair_up():
    with pytest.raises(ValueError, match="pairs of name and path, got 3 words"):
        eval_datasets_from_args(make_args(eval_prompt_data=["x", "a.jsonl", "y"]))


def test_k26_unknown_keys_list_the_valid_ones(tmp_path):
    with pytest.raises(ValueError, match=r"defaults: unknown keys \['temprature'\]; valid keys: .*temperature"):
        from_yaml(tmp_path, "{defaults: {temprature: 0.6}, datasets: [{name: a, path: b}]}")
    with pytest.raises(TypeError, match=r"dataset 'a': unknown keys \['temprature'\]; valid keys: .*temperature"):
        from_yaml(tmp_path, "datasets: [{name: a, path: b, temprature: 0.6}]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "non-empty `datasets:`"),
        ("eval: {datasets: []}", "non-empty `datasets:`"),
        ("{datasets: [{name: a, path: b}], default: {}}", r"unknown keys \['default'\]"),
        ("datasets: [a]", "must be a list of mappings"),
        ("datasets: [{path: b}]", r"\['name'\] must be given"),
        ("datasets: {a: }", r"dataset 'a': \['path'\] must be given"),
        ("datasets: [{name: a, path: b}, {name: a, path: c}]", r"names \['a'\] occur more than once"),
        ("{defaults: {path: b}, datasets: [{name: a}]}", r"unknown keys \['path'\]"),
    ],
)
def test_wrong_shapes(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        from_yaml(tmp_path, text)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", -0.5, ">= 0"),
        ("temperature", "hot", "must be a number"),
        ("temperature", True, ">= 0"),
        ("top_p", 0, r"within \(0, 1\]"),
        ("top_k", 0, "-1"),
        ("n_samples_per_eval_prompt", 0, ">= 1"),
        ("max_response_len", 0, ">= 1"),
        ("min_eval_samples", 0, ">= 1"),
    ],
)
def test_k27_values_out_of_range(field, value, rule):
    with pytest.raises(ValueError, match=f"dataset 'a': {field} is {value!r}, must be .*{rule}|{field} is 'hot'"):
        build_eval_dataset_configs(make_args(), [{"name": "a", "path": "b", field: value}], {})


def test_temperature_zero_is_greedy_and_exponents_are_numbers(tmp_path):
    one, two = from_yaml(
        tmp_path, "datasets: [{name: a, path: b, temperature: 0}, {name: c, path: d, temperature: 1e-1}]"
    )
    assert one.temperature == 0 and two.temperature == 0.1


def test_a_dataset_with_its_own_rm_type_leaves_the_global_custom_function():
    args = make_args(custom_rm_path="pkg.rm")
    entries = [
        {"name": "plain", "path": "p"},
        {"name": "own", "path": "p", "rm_type": "math"},
        {"name": "both", "path": "p", "rm_type": "math", "custom_rm_path": "pkg.other"},
    ]
    assert [c.custom_rm_path for c in build_eval_dataset_configs(args, entries, {})] == ["pkg.rm", "", "pkg.other"]
