"""What the GLM-5.2 example makes and rewards: a checkpoint that transformers and the trainer's tables know to the last
tensor, prompts longer than the indexer's choice, and a share of tokens."""

import asyncio
import json

import pytest
from safetensors.torch import load_file

from examples.glm5_tiny.reward import reward_func
from slime.utils.layout.index_sharing import index_sharing_of_config
from slime.utils.model_facts import megatron_args
from slime.utils.types import Sample
from tests.helpers.model_configs import config_of
from tools import make_glm5_tiny


def response(tokens: list[int], length: int) -> Sample:
    return Sample(prompt="", tokens=tokens, response_length=length, label="125")


def test_reward_is_the_share_below_the_label():
    samples = [response([7, 7, 124, 125, 3, 249], 4), response([7, 7], 0), response([200, 124], 1)]
    assert asyncio.run(reward_func(None, samples)) == [0.5, 0.0, 1.0]
    assert asyncio.run(reward_func(None, samples[0])) == 0.5


@pytest.mark.parametrize("mtp", [False, True])
def test_checkpoint_is_what_transformers_has(tmp_path, mtp):
    """Same names and shapes as transformers' model of the config, apart from the layer that it does not have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_glm5_tiny.main(["--out", str(tmp_path), *(["--mtp"] if mtp else [])])
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "hf"))
    layers = {int(name.split(".")[2]) for name in weights if name.startswith("model.layers.")}
    assert layers == set(range(8 + mtp))
    theirs = {name: tuple(weight.shape) for name, weight in model.state_dict().items() if ".experts." not in name}
    ours = {
        name: tuple(weight.shape)
        for name, weight in weights.items()
        if ".mlp.experts." not in name and not name.startswith("model.layers.8.")
    }
    assert ours == theirs
    assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in weights.values())
    assert sum(".mlp.experts." in name for name in weights) == (5 + mtp) * 8 * 3


def test_a_file_in_the_place_of_the_directory_is_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(SystemExit):
        make_glm5_tiny.main(["--out", str(tmp_path / "file")])
    assert "is a file, must be a directory" in capsys.readouterr().err and (tmp_path / "file").read_text() == "kept"


def test_config_has_the_keys_and_schedule_of_the_published_one():
    published, tiny = config_of("glm5.2-744B-A40B"), make_glm5_tiny.make_config(make_glm5_tiny.H200, mtp=True)
    assert not published.keys() - tiny.keys() - {"transformers_version"}
    assert index_sharing_of_config(tiny).computing_layers == index_sharing_of_config(published).computing_layers[:4]
    same = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads")
    same += ("index_n_heads", "index_head_dim", "index_topk", "indexer_rope_interleave", "rms_norm_eps")
    assert {key: tiny[key] for key in same} == {key: published[key] for key in same}
    ours, theirs = megatron_args(tiny), megatron_args(published)
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("shape", make_glm5_tiny.SHAPES)
def test_prompts_exceed_what_is_chosen(tmp_path, shape):
    make_glm5_tiny.main(["--out", str(tmp_path), "--shape", shape, "--no-weights"])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    tokenizer = make_glm5_tiny.make_tokenizer(config["vocab_size"])
    for row in rows[:20]:
        ids = tokenizer.encode(row["prompt"], add_special_tokens=False)
        assert config["index_topk"] < len(ids) < config["max_position_embeddings"] - 64
        assert min(ids) >= 3 and tokenizer.decode(ids) == row["prompt"]
        assert row["label"] == str(config["vocab_size"] // 2)
