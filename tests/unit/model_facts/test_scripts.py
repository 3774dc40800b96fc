"""scripts/models/*.sh hold exactly what the checkpoints' config.json say, and define nothing but MODEL_ARGS."""

import re
import subprocess

import pytest

from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.upstream import load_tables
from slime.utils.layout.moe_layers import moe_layer_pattern
from slime.utils.model_facts import RECIPE_FLAGS, megatron_args, to_tokens
from slime.utils.model_facts.script import ORDER
from tests.helpers.model_configs import CONFIGS, ROOT, config_of, sourced
from tools import model_args

SCRIPTS = sorted(file.stem for file in (ROOT / "scripts/models").glob("*.sh"))
# Those that source another one.
DERIVED = ("deepseek-v3-20layer", "deepseek-v3-5layer", "llama3.2-3B-Instruct-amd", "qwen3-4B-Instruct-2507")
NAMES = """
deepseek-v3 deepseek-v3-20layer deepseek-v3-5layer glm4-32B glm4-9B glm4.5-106B-A12B glm4.5-355B-A32B glm4.7-30B-A3B
glm5-744B-A40B glm5.2-744B-A40B kimi-k2 kimi-k2-thinking llama3.1-8B-Instruct llama3.2-3B-Instruct
llama3.2-3B-Instruct-amd mimo-7B-rl minimax-m2 moonlight qwen2.5-0.5B qwen2.5-1.5B qwen2.5-32B qwen2.5-3B qwen2.5-7B
qwen3-0.6B qwen3-1.7B qwen3-14B qwen3-235B-A22B qwen3-30B-A3B qwen3-32B qwen3-4B qwen3-4B-Instruct-2507 qwen3-8B
qwen3-next-80B-A3B qwen3.5-0.8B qwen3.5-27B qwen3.5-35B-A3B qwen3.5-35B-A3B-vl qwen3.5-4B qwen3.5-9B quickstart
""".split()


def expected(name: str) -> dict:
    return megatron_args(config_of(name), multimodal=name.endswith("-vl"))


@pytest.fixture(scope="module")
def grammar():
    return Grammar(load_tables())


def test_every_model_has_a_script_and_a_config():
    """A launcher sources its model by name: a renamed script would fail on the cluster only."""
    assert set(SCRIPTS) == set(NAMES) == set(CONFIGS)


@pytest.mark.parametrize("name", NAMES)
def test_script_equals_config(name):
    """The hand-copied value that drifted (a factor of 8 for a model with 32) trains another model than the engines
    serve; each script is what its config.json gives, word by word."""
    assert sourced(name) == to_tokens(expected(name))


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(DERIVED)))
def test_script_is_what_its_heading_says(name, capsys):
    """The command in the heading rewrites the file, headings, order and knobs included."""
    text = (ROOT / f"scripts/models/{name}.sh").read_text()
    command = re.search(r"python tools/model_args.py CONFIG (.*)", text)[1].split()
    assert model_args.main([str(CONFIGS[name]), *command]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_is_known_and_takes_its_value(name, grammar):
    """A flag that neither Megatron nor our tables know would end every run of this model in its parser."""
    args = expected(name)
    line = grammar.read(to_tokens(args))
    wrong = [problem for problem in line.problems if problem.kind != "unsupported"]
    assert not wrong, wrong
    assert len(line.given) == len(args)  # no two flags set the same thing
    pattern = line.values["moe_layer_freq"]
    if "--num-experts" in args:
        assert len(moe_layer_pattern(pattern, args["--num-layers"])) == args["--num-layers"]


def test_every_flag_has_a_place_in_a_script():
    assert set(ORDER) >= RECIPE_FLAGS
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("name", ["qwen3-4B-Instruct-2507", "deepseek-v3-5layer", "glm5.2-744B-A40B"])
def test_sourcing_leaves_no_variable_behind(name):
    """A script that leaves SCRIPT_DIR or NLAYERS in the launcher's shell changes what the launcher does next."""
    code = f"""before=; name=; before=$(compgen -A variable)
    source "{ROOT}/scripts/models/{name}.sh"
    for name in $(compgen -A variable); do grep -qx -- "$name" <<<"$before" || echo "$name"; done"""
    new = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(new) - {"PIPESTATUS", "_"} == {"MODEL_ARGS"}


def test_derived_scripts_are_found_from_anywhere(tmp_path):
    """Sourced by a launcher whose working directory is not the repository."""
    assert sourced("deepseek-v3-20layer", cwd=tmp_path) == to_tokens(expected("deepseek-v3-20layer"))


def test_knob_of_the_rotary_base():
    for name in ("qwen3-1.7B", "qwen3-4B", "qwen3-8B", "qwen3-30B-A3B", "qwen3-235B-A22B"):
        tokens = sourced(name, MODEL_ARGS_ROTARY_BASE="777")
        assert tokens == to_tokens(expected(name) | {"--rotary-base": 777})


def test_knob_of_the_number_of_layers():
    """A cut model keeps its three dense layers; the rest has experts."""
    tokens = sourced("deepseek-v3", MODEL_ARGS_NUM_LAYERS="7")
    assert tokens == to_tokens(expected("deepseek-v3") | {"--num-layers": 7, "--moe-layer-freq": "[0]*3+[1]*4"})


def test_a_derived_script_does_not_change_the_knob_it_sets():
    """The launcher that sources two models gets both right."""
    after = f'source "{ROOT}/scripts/models/qwen3-4B.sh"'
    assert sourced("qwen3-4B-Instruct-2507", after=after) == to_tokens(expected("qwen3-4B"))


def test_unquoted_expansion_keeps_the_words(tmp_path):
    """Many launchers expand ${MODEL_ARGS[@]} without quotes: "[0]*3+[1]*58" is a glob then, which matches no file."""
    tokens = sourced("deepseek-v3", after="MODEL_ARGS=(${MODEL_ARGS[@]})")
    assert tokens == to_tokens(expected("deepseek-v3"))
