"""The model described by --hf-checkpoint's config.json: filled in, overridden, and compared with the command line."""

import json
import shutil
from pathlib import Path

import pytest

from slime.utils.arguments.checkpoint_facts import MUST_AGREE, TRAINABLE, same_fact
from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.upstream import load_tables
from tests.unit.arguments.conftest import MODEL

CONFIGS = Path(__file__).resolve().parents[2] / "data" / "hf_configs"


def use_config(case, name: str, **changes) -> None:
    """Give the case a published model's config.json and leave its own model flags out."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    (case.hf / "config.json").write_text(json.dumps({**config, **changes}))
    for flag in MODEL:
        case.flags.pop(flag, None)


def texts(problems) -> str:
    return "\n".join(map(str, problems))


def test_the_model_needs_no_flags(case):
    args = case.args(without=tuple(MODEL))
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.num_attention_heads) == (6, 48, 100, 12)
    assert (args.group_query_attention, args.num_query_groups, args.kv_channels) == (True, 4, 4)
    assert (args.rotary_base, args.layernorm_epsilon, args.vocab_size) == (1000000, 1e-6, 250)
    assert (args.normalization, args.swiglu, args.add_bias_linear, args.qk_layernorm) == ("RMSNorm", True, False, True)
    assert args.untie_embeddings_and_output_weights is True
    assert args.checkpoint_facts["num_layers"] == 6 and args.model_type == "qwen3"


def test_with_and_without_model_flags_the_run_is_the_same(case):
    typed, derived = (vars(case.args(without=without)) for without in ((), tuple(MODEL)))
    same = typed.keys() - {"megatron_argv", "log_dir"}
    assert {name: typed[name] for name in same} == {name: derived[name] for name in same}


def test_facts_come_first_for_megatrons_parser_so_that_the_users_words_win(case):
    argv = case.args(without=("--num-layers", "--rotary-base")).megatron_argv
    assert argv.index("--num-layers") < argv.index("--hidden-size") == argv.index("48") - 1
    assert argv.count("--hidden-size") == 1  # given by the user: config.json does not repeat it
    assert argv[argv.index("--num-layers") + 1] == "6" and argv[argv.index("--rotary-base") + 1] == "1000000"


def test_each_difference_is_a_line(case):
    case.write_config(rope_theta=1e6, rms_norm_eps=1e-5)
    lines = case.reading(rotary_base=10000, norm_epsilon="1e-6").differences
    assert lines == [
        "norm-epsilon: config 1e-05, command line 1e-06",
        "rotary-base: config 1000000, command line 10000",
    ]


def test_differences_are_printed_at_the_start(case, caplog):
    case.args(rotary_base=10000)
    assert "rotary-base: config 1000000, command line 10000" in caplog.text
    caplog.clear()
    case.args()
    assert "config.json" not in caplog.text


def test_the_users_value_wins(case):
    reading = case.reading(rotary_base=10000, without=("--norm-epsilon",))
    assert (reading.args.rotary_base, reading.args.layernorm_epsilon) == (10000, 1e-6)
    assert reading.args.checkpoint_facts["rotary_base"] == 1000000


def test_a_switch_that_the_config_lacks_is_a_difference(case):
    """A switch cannot be given as off, so only a switch too much can differ; unsaid ones follow config.json."""
    assert case.reading("--add-qkv-bias").differences == ["add-qkv-bias: config off, command line on"]
    case.write_config(tie_word_embeddings=True)
    line = "untie-embeddings-and-output-weights: config off, command line on"
    assert line in case.reading().differences
    assert line not in case.reading(without=("--untie-embeddings-and-output-weights",)).differences


def test_values_of_a_file_count_as_given(case):
    file = case.directory / "custom.yaml"
    file.write_text("rotary_base: 10000\n")
    reading = case.reading(custom_config_path=file, without=("--rotary-base",))
    assert reading.args.rotary_base == 10000
    assert reading.differences == ["rotary-base: config 1000000, command line 10000"]


def test_a_layer_pattern_may_be_written_otherwise(case):
    use_config(case, "glm4.5-106B-A12B")
    assert case.reading().args.moe_layer_freq == "[0]*1+[1]*45"
    assert case.reading(moe_layer_freq="[0]+[1]*20+[1]*25").differences == []
    (line,) = case.reading(moe_layer_freq="[0]*2+[1]*44").differences
    assert line == "moe-layer-freq: config [0]*1+[1]*45, command line [0]*2+[1]*44"


def test_how_a_model_is_trained_is_no_fact_of_its_config(case):
    use_config(case, "qwen3-30B-A3B")
    reading = case.reading("--moe-token-dispatcher-type", "flex", "--moe-aux-loss-coeff", "0.01")
    assert reading.differences == []
    assert reading.args.moe_token_dispatcher_type == "flex" and reading.args.moe_grouped_gemm is True


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_every_published_config_describes_a_whole_model(case, name):
    """Nothing of a model is left at Megatron's defaults, and only families that train are without a problem."""
    use_config(case, name)
    reading = case.reading(dry_run=True)
    args = reading.args
    assert args.num_layers and args.hidden_size and args.num_attention_heads and args.vocab_size
    assert args.normalization == "RMSNorm" and not args.add_bias_linear
    assert reading.differences == []
    family = [problem for problem in reading.problems if "model_type" in problem.says]
    if args.model_type in TRAINABLE:
        assert not family
    else:
        assert [problem.kind for problem in family] == ["unsupported"] and args.model_type in family[0].says


def test_a_family_that_cannot_be_trained_yet_may_come_with_its_own_model(case):
    text = json.loads((CONFIGS / "kimi-k2.json").read_text())
    use_config(case, "kimi-k2", model_type="kimi_k25", text_config=text)
    assert "model_type kimi_k25, which is not supported yet" in texts(case.reading().problems)
    provider = ("--custom-model-provider-path", "slime.utils.misc.load_function")
    assert "model_type" not in texts(case.reading(*provider).problems)
    assert "model_type" not in texts(case.reading("--debug-rollout-only").problems)


def test_an_unknown_family_is_not_supported_and_the_nearest_is_named(case):
    case.write_config(model_type="qwen33")
    (problem,) = [p for p in case.reading().problems if p.kind == "unsupported"]
    assert "qwen33" in problem.says and "qwen3" in problem.says and str(case.hf) in problem.says
    assert case.reading().args.checkpoint_facts == {}
    assert "qwen33" not in texts(case.reading("--debug-rollout-only").problems)


def test_a_broken_config_is_one_problem(case):
    (case.hf / "config.json").write_text('{"model_type": "qwen3",\n broken')
    problems = [problem for problem in case.reading().problems if "not JSON" in problem.says]
    assert len(problems) == 1 and "config.json:2" in problems[0].says


def test_a_missing_field_names_file_and_field(case):
    config = json.loads((case.hf / "config.json").read_text())
    del config["num_key_value_heads"]
    (case.hf / "config.json").write_text(json.dumps(config))
    assert "num_key_value_heads" in texts(case.reading().problems)


def test_without_a_checkpoint_the_command_line_stands_alone(case):
    shutil.rmtree(case.hf)
    reading = case.reading(dry_run=True)
    assert reading.args.num_layers == 6 and reading.differences == []
    assert (reading.args.model_type, reading.args.hf_config, reading.args.checkpoint_facts) == (None, None, {})


def test_a_plan_may_name_the_config_of_a_checkpoint_elsewhere(case):
    """The checkpoint of a cluster is not on the laptop that plans; its config.json can be."""
    shutil.rmtree(case.hf)
    file = CONFIGS / "qwen3-4B.json"
    planned = case.reading(plan_hf_config=file, without=tuple(MODEL), dry_run=True)
    assert (planned.args.num_layers, planned.args.model_type) == (36, "qwen3")
    assert planned.args.hf_config["hidden_size"] == planned.args.hidden_size == 2560
    assert case.reading(plan_hf_config=file, dry_run=True).differences
    started = case.reading(plan_hf_config=file, without=tuple(MODEL)).args
    assert started.num_layers is None and started.hf_config is None  # a launch reads its own checkpoint only
    absent = case.reading(plan_hf_config="nowhere.json", dry_run=True).problems
    assert any(problem.flags == ("--plan-hf-config",) and "nowhere.json" in problem.says for problem in absent)


def test_the_language_model_of_a_multimodal_config(case):
    use_config(case, "qwen3.5-35B-A3B-vl")
    reading = case.reading()
    assert reading.args.hf_config["num_hidden_layers"] == reading.args.num_layers
    assert reading.args.model_type == "qwen3_5_moe"
    use_config(case, "qwen3.5-35B-A3B-vl", quantization_config={"quant_method": "fp8"})
    assert case.reading().args.hf_config["quantization_config"] == {"quant_method": "fp8"}


def test_sparse_attention_gathers_by_itself(case):
    """Without the flag a launch of a sparse model died in the trainers, which only gather."""
    use_config(case, "glm5.2-744B-A40B")
    reading = case.reading("--context-parallel-size", "2", dry_run=True)
    assert reading.args.allgather_cp is True and reading.args.cp_comm_type == ["all_gather"]
    assert any("--allgather-cp is on" in notice for notice in reading.notices)
    given = case.reading("--context-parallel-size", "2", "--allgather-cp", dry_run=True)
    assert not any("--allgather-cp" in notice for notice in given.notices)
    alone = case.reading(dry_run=True)
    assert alone.args.cp_comm_type == ["p2p"] and not any("--allgather-cp" in notice for notice in alone.notices)


def test_without_config_the_models_flags_tell_sparse_attention(case):
    shutil.rmtree(case.hf)
    reading = case.reading("--context-parallel-size", "2", "--experimental-attention-variant", "dsa")
    assert reading.args.allgather_cp is True


def test_other_models_exchange_as_the_user_says(case):
    size = ("--context-parallel-size", "2")
    assert case.reading(*size).args.cp_comm_type == ["p2p"]
    assert case.args(*size, "--allgather-cp").cp_comm_type == ["all_gather"]
    assert case.args(*size, "--allgather-cp", "--cp-comm-type", "allgather").cp_comm_type == ["all_gather"]
    assert case.args("--allgather-cp").cp_comm_type == ["p2p"]
    text = case.only_problem(*size, "--allgather-cp", "--cp-comm-type", "p2p")
    assert text.startswith("--cp-comm-type: is p2p, and --allgather-cp") and "try: --cp-comm-type all_gather" in text


@pytest.mark.parametrize(
    ("dest", "fact", "value", "same"),
    [
        ("rotary_base", 10000, 10000.0, True),
        ("layernorm_epsilon", 1e-6, 1.0000000000001e-6, True),
        ("layernorm_epsilon", 1e-6, 1e-5, False),
        ("moe_layer_freq", "[0]*1+[1]*2", "[0,1,1]", True),
        ("moe_layer_freq", "[0]*1+[1]*2", "[0,1]", False),
        ("moe_layer_freq", 1, "[1]*3", True),
        ("spec", ["a", "b"], ["a", "c"], False),
        ("q_lora_rank", None, 3, False),
    ],
)
def test_same_fact(dest, fact, value, same):
    assert same_fact(dest, fact, value, 3) is same


def test_must_agree_names_attributes_that_exist():
    assert set(MUST_AGREE) <= Grammar(load_tables()).by_dest.keys()


def test_a_file_that_is_no_json_is_named(case):
    """A file of bytes, and one nested without end, ended in a stack trace."""
    for content, says in ((b"\xff\xfe", "cannot be read"), (b"[" * 100_000, "cannot be read"), (b"{", "not JSON")):
        (case.hf / "config.json").write_bytes(content)
        assert says in texts(case.reading().problems)


@pytest.mark.parametrize("name", ["glm5.2-744B-A40B", "qwen3-next-80B-A3B"])
def test_no_value_of_a_config_breaks_the_reading(case, name):
    """`"num_key_value_heads": 0`, a list of widths, a text for a length: each was a stack trace of the checks."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    use_config(case, name)
    for key in config:
        for value in (None, "x", 0, -1, [1, 2], {"a": 1}, float("inf")):
            (case.hf / "config.json").write_text(json.dumps({**config, key: value}))
            case.reading(dry_run=True, accelerator="cuda")
    for value in ({"quant_method": "fp8", "weight_block_size": block} for block in ("x", [0, 0], [128], ["a", "b"])):
        (case.hf / "config.json").write_text(json.dumps({**config, "quantization_config": value}))
        case.reading(dry_run=True, accelerator="cuda")


def test_a_size_that_is_none_is_named(case):
    case.write_config(num_key_value_heads=0)
    says = "num_key_value_heads is 0, must be within 1 and 2,147,483,647"
    assert says in texts(case.reading(without=tuple(MODEL)).problems)
    case.write_config(intermediate_size=[100, 200])
    assert "intermediate_size is [100, 200], not a whole number" in texts(case.reading(without=tuple(MODEL)).problems)
