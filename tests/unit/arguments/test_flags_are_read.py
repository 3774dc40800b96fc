"""No flag is accepted that nothing reads: code outside the tables reads its attribute, or Megatron does."""

import ast
from pathlib import Path

import pytest

from slime.utils.arguments.groups import GROUPS
from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.upstream import load_tables

ROOT = Path(__file__).resolve().parents[3]
# What the arguments are called where they are read.
NAMES = {"args", "_args", "arguments", "a", "view", "megatron"}
# Read by name: through getattr(args, "..."), or from the table of fallbacks of an evaluation's settings.
BY_NAME = {
    "custom_rm_path": "slime/rollout/rm_hub/__init__.py",
    "rm_type": "slime/rollout/rm_hub/__init__.py",
    "custom_config_path": "slime/utils/arguments/reading.py",
    "megatron_config_path": "slime/utils/arguments/reading.py",
    "eval_input_key": "slime/utils/eval_config.py",
    "eval_label_key": "slime/utils/eval_config.py",
    "eval_max_response_len": "slime/utils/eval_config.py",
    "eval_min_new_tokens": "slime/utils/eval_config.py",
    "eval_temperature": "slime/utils/eval_config.py",
    "eval_tool_key": "slime/utils/eval_config.py",
    "eval_top_k": "slime/utils/eval_config.py",
    "eval_top_p": "slime/utils/eval_config.py",
    "n_samples_per_eval_prompt": "slime/utils/eval_config.py",
    "post_self_attn_layernorm": "slime/utils/model_shape.py",
    "post_mlp_layernorm": "slime/utils/model_shape.py",
}
# Flags that leave no choice: their one supported value is what the code does, or a check holds them to it.
NO_CHOICE = {"train_backend", "rollout_data_transport"}
CHECKED = {"distributed_backend", "freeze_indexer"}
# A deprecated flag says itself that it changes nothing.
SUPPORTED = [flag for group in GROUPS for flag in group.flags if flag.supported and not flag.deprecated]


def attributes_read() -> set[str]:
    tables = ROOT / "slime" / "utils" / "arguments"
    readers = [path for path in (ROOT / "slime").rglob("*.py") if tables not in path.parents]
    readers += [ROOT / "train.py", tables / "derive.py", tables / "reading.py"]
    return {
        node.attr
        for path in readers
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and ast.unparse(node.value).split(".")[-1] in NAMES
    }


def test_every_supported_flag_is_read():
    read = attributes_read() | BY_NAME.keys() | NO_CHOICE | CHECKED
    megatron = Grammar(load_tables()).megatron_options
    unread = [flag.name for flag in SUPPORTED if flag.dest not in read and flag.name not in megatron]
    assert not unread, f"nothing reads {unread}: implement them or mark the rows supported=False"


@pytest.mark.parametrize("dest", sorted(BY_NAME))
def test_names_in_text_are_where_this_test_says(dest):
    tree = ast.parse((ROOT / BY_NAME[dest]).read_text(encoding="utf-8"))
    assert dest in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_a_flag_without_a_choice_has_one_value():
    for flag in SUPPORTED:
        if flag.dest in NO_CHOICE:
            assert set(flag.choices) - set(flag.unsupported_choices) == {flag.default}
