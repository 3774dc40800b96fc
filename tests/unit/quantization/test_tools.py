"""The command lines: names and defaults, one sentence for what a user can mend, and what comes out."""

import json
import shutil

import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8, ChannelFp8, TensorFp8
from tests.unit.quantization.test_convert_checkpoint import same_tensors, tensors_of
from tools import (
    convert_hf_to_fp8,
    convert_hf_to_int4,
    convert_hf_to_int4_direct,
    convert_k2_thinking_int4_to_bf16,
    fp8_cast_bf16,
)


def config_of(directory) -> dict:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def failing(main, *argv, capsys=None) -> str:
    """What the tool says when it gives up."""
    with pytest.raises(SystemExit) as error:
        main([str(argument) for argument in argv])
    return capsys.readouterr().err if capsys else str(error.value.code)


def test_fp8_defaults_are_blocks_of_128(checkpoints, tmp_path):
    convert_hf_to_fp8.main(["--model-dir", str(checkpoints / "moe"), "--save-dir", str(tmp_path / "out")])
    assert config_of(tmp_path / "out") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            "model.embed_tokens",
            "model.layers.0.mlp.gate",
            "model.layers.1.mlp.gate",
        ],
    }
    fp8_cast_bf16.main(["--input-fp8-hf-path", str(tmp_path / "out"), "--output-bf16-hf-path", str(tmp_path / "back")])
    source, back = tensors_of(checkpoints / "moe"), tensors_of(tmp_path / "back")
    assert source.keys() == back.keys()
    for name, tensor in source.items():
        relative = ((back[name].float() - tensor.float()).norm() / tensor.float().norm()).item()
        assert (0.005 < relative < 0.05) if name.endswith("_proj.weight") else relative == 0


def test_fp8_flags():
    def format_of(*flags):
        return convert_hf_to_fp8.make_format(
            convert_hf_to_fp8.parse_args(["--model-dir", "a", "--save-dir", "b", *flags])
        )

    assert format_of("--strategy", "block", "--block-size", "64", "32") == BlockFp8((64, 32))
    assert format_of("--scale-fmt", "ue8m0") == BlockFp8((128, 128), power_of_two=True)
    assert format_of("--strategy", "channel") == ChannelFp8() and format_of("--strategy", "tensor") == TensorFp8()
    assert convert_hf_to_fp8.parse_args(["--model-dir", "a", "--save-dir", "b"]).max_workers == 4


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--strategy", "channel", "--block-size", "64", "64"], "are for --strategy block, not channel"),
        (["--block-size", "0", "64"], "--block-size 0 64: both must be positive"),
        (["--max-workers", "0"], "--max-workers 0 must be at least 1"),
    ],
)
def test_fp8_flags_that_mean_nothing(flags, message, capsys):
    assert message in failing(convert_hf_to_fp8.main, "--model-dir", "a", "--save-dir", "b", *flags, capsys=capsys)


def test_partial_blocks_are_announced(tmp_path, checkpoints, caplog):
    convert_hf_to_fp8.main(
        ["--model-dir", str(checkpoints / "dense"), "--save-dir", str(tmp_path / "a"), "--block-size", "96", "128"]
    )
    assert "weights are no multiples of the block, e.g. model.layers.0." in caplog.text


def test_errors_are_one_sentence(checkpoints, tmp_path):
    model = ("--model-dir", checkpoints / "dense", "--save-dir")
    assert failing(convert_hf_to_fp8.main, "--model-dir", tmp_path, "--save-dir", "b").startswith("error: ")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "replace it with --force" in failing(convert_hf_to_fp8.main, *model, tmp_path / "full")
    assert "ignore all of them or none" in failing(
        convert_hf_to_fp8.main, *model, tmp_path / "out", "--ignore-rules", "layers.0.mlp.up_proj"
    )
    assert "group size 100; sizes that fit: 16, 32, 64, 128" in failing(
        convert_hf_to_int4_direct.main, *model, tmp_path / "out", "--group-size", "100"
    )


def test_int4_of_experts_only_and_back(checkpoints, tmp_path):
    """Experts are INT4, attention and router are bit for bit what they were."""
    convert_hf_to_int4_direct.main(
        ["--model-dir", str(checkpoints / "moe"), "--save-dir", str(tmp_path / "q"), "--group-size", "64"]
    )
    weights = config_of(tmp_path / "q")["config_groups"]["group_0"]["weights"]
    assert (weights["group_size"], weights["num_bits"], weights["symmetric"]) == (64, 4, True)
    convert_k2_thinking_int4_to_bf16.main(["--model-dir", str(tmp_path / "q")])
    source, back = tensors_of(checkpoints / "moe"), tensors_of(tmp_path / "q_bf16")
    assert source.keys() == back.keys()
    for name, tensor in source.items():
        relative = ((back[name].float() - tensor.float()).norm() / tensor.float().norm()).item()
        assert (0.03 < relative < 0.2) if ".experts." in name else relative == 0
    convert_hf_to_int4.main(
        ["--input-dir", str(checkpoints / "moe"), "--output-dir", str(tmp_path / "r"), "--quant-group-size", "64"]
    )
    assert same_tensors(tensors_of(tmp_path / "q"), tensors_of(tmp_path / "r"))


def test_int4_rules_replace_the_choice_of_experts(checkpoints, tmp_path):
    convert_hf_to_int4_direct.main(
        ["--model-dir", str(checkpoints / "moe"), "--save-dir", str(tmp_path / "q"), "--ignore-rules", "re:.*experts"]
    )
    tensors = tensors_of(tmp_path / "q")
    assert "model.layers.0.self_attn.o_proj.weight_packed" in tensors
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in tensors
    assert "model.layers.0.mlp.gate.weight" in tensors


@pytest.mark.parametrize("text, value", [(["--is-symmetric"], True), (["--is-symmetric", "False"], False), ([], True)])
def test_symmetric_flag(text, value):
    args = convert_hf_to_int4_direct.parse_args(["--model-dir", "a", "--save-dir", "b", *text])
    assert args.is_symmetric is value and args.group_size == 32


def test_asymmetric_experts_are_refused(checkpoints, tmp_path):
    message = failing(
        convert_hf_to_int4_direct.main,
        *("--model-dir", checkpoints / "moe", "--save-dir", tmp_path / "q", "--is-symmetric", "false"),
    )
    assert "zero points of experts" in message and not (tmp_path / "q").exists()


def test_gptq_without_llm_compressor_is_one_sentence(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ("--input-dir", checkpoints / "dense", "--output-dir", tmp_path / "q", "--data-dir", "rows.jsonl")
    assert "needs llm-compressor, which is not installed" in failing(convert_hf_to_int4.main, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--method", "gptq"], "--method gptq needs calibration data: --data-dir"),
        (["--method", "rtn", "--data-dir", "rows"], "--method rtn does not use --data-dir"),
        (["--quant-group-size", "0"], "--quant-group-size 0 must be at least 1"),
    ],
)
def test_int4_methods_and_their_data(flags, message, capsys):
    """Calibration data that is given and not used would look like a calibrated model."""
    arguments = ("--input-dir", "a", "--output-dir", "b", *flags)
    assert message in failing(convert_hf_to_int4.main, *arguments, capsys=capsys)


def test_calibration_rows(tmp_path):
    class Tokenizer:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": ([0] if add_special_tokens else []) + [ord(letter) for letter in text]}

        def apply_chat_template(self, messages, tokenize):
            return "".join(f"<{message['content']}>" for message in messages)

    path = tmp_path / "rows.jsonl"
    rows = [{"text": "abc"}, {"messages": [{"role": "user", "content": "d"}]}, {"prompt": "ef"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--input-dir", "a", "--output-dir", "b", "--data-dir", str(path), "--max-sequence-length", "3"]
    args = convert_hf_to_int4.parse_args(flags)
    assert convert_hf_to_int4._token_rows(args, Tokenizer()) == [[0, 97, 98], [60, 100, 62], [0, 101, 102]]
    path.write_text('{"question": 1}\n')
    with pytest.raises(ValueError, match=r'row 1 has no column "text", "messages" or "prompt" \(it has question\)'):
        convert_hf_to_int4._token_rows(args, Tokenizer())


def test_another_config_can_be_named(checkpoints, tmp_path):
    """A copy without its quantization_config converts with the original's."""
    convert_hf_to_int4_direct.main(["--model-dir", str(checkpoints / "dense"), "--save-dir", str(tmp_path / "q")])
    shutil.move(tmp_path / "q" / "config.json", tmp_path / "original.json")
    (tmp_path / "q" / "config.json").write_text("{}")
    arguments = ["--model-dir", str(tmp_path / "q"), "--output-dir", str(tmp_path / "out")]
    assert "is not quantised" in failing(convert_k2_thinking_int4_to_bf16.main, *arguments)
    convert_k2_thinking_int4_to_bf16.main([*arguments, "--config-path", str(tmp_path / "original.json")])
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors_of(tmp_path / "out").values())
