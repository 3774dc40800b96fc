"""tools/model_args.py: where it finds the config, what it prints, and what it says when it cannot."""

import json
import subprocess
import sys

import pytest

from slime.utils.model_facts import megatron_args, to_tokens
from tests.helpers.model_configs import CONFIGS, ROOT, config_of
from tools import model_args


def bash_array(text: str) -> list[str]:
    code = text + "printf '%s\\0' \"${MODEL_ARGS[@]}\""
    return subprocess.run(["bash", "-c", code], capture_output=True, check=True, text=True).stdout.split("\0")[:-1]


def test_directory_and_file_give_the_same_array(checkpoint, capsys):
    directory = checkpoint(config_of("glm4.5-355B-A32B"))
    printed = []
    for path in (directory, directory / "config.json", CONFIGS["glm4.5-355B-A32B"]):
        assert model_args.main([str(path)]) == 0
        printed.append(bash_array(capsys.readouterr().out))
    assert printed == [to_tokens(megatron_args(config_of("glm4.5-355B-A32B")))] * 3


def test_json(checkpoint, capsys):
    assert model_args.main([str(checkpoint(config_of("glm4-9B"))), "--json"]) == 0
    args = json.loads(capsys.readouterr().out)
    assert args["--spec"] == ["slime_plugins.models.glm4", "get_glm_spec"]
    assert args["--num-query-groups"] == 2 and args["--rotary-interleaved"] is True


def test_composite_model(checkpoint, capsys):
    """A vision-language checkpoint has the language model's fields one level down, and a --spec of its own."""
    directory = str(checkpoint(config_of("qwen3.5-27B")))
    assert model_args.main([directory, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert model_args.main([directory, "--json", "--multimodal"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert text["--hidden-size"] == 5120 and text["--spec"][0] == "slime_plugins.models.qwen3_5"
    assert whole.pop("--spec")[0] == "slime_plugins.models.qwen3_5_vl"
    assert whole == {flag: value for flag, value in text.items() if flag != "--spec"}


@pytest.mark.parametrize(
    "config, says",
    [
        ({"model_type": "qwen4"}, "model_type qwen4 is unknown; did you mean qwen"),
        ({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2"}}, "model_type qwen2_5_vl is unknown"),
        ({"hidden_size": 8}, "model_type is missing; known: deepseek_v3"),
        ({"model_type": "qwen3"}, "num_hidden_layers is missing, and qwen3 models need it"),
        ('{"model_type": "qwen3",}', "config.json:1: not JSON"),
        ("[]", "holds a list, not an object"),
    ],
)
def test_errors_name_the_file(config, says, checkpoint, capsys):
    directory = checkpoint(config)
    assert model_args.main([str(directory)]) == 2
    printed = capsys.readouterr()
    assert not printed.out and says in printed.err and str(directory / "config.json") in printed.err


def test_no_such_file(tmp_path, capsys):
    assert model_args.main([str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path / 'nowhere'}: there is no such file" in capsys.readouterr().err


def test_command_needs_no_torch():
    """It answers in a second on a laptop that has Python alone."""
    code = f"""import sys
from tools import model_args
model_args.main([{str(CONFIGS["quickstart"])!r}])
print([m for m in ("torch", "transformers", "megatron", "sglang", "ray") if m in sys.modules])"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.endswith("[]\n")
