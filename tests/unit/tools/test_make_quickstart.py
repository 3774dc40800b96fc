"""The quickstart's model and data: the tokenizer says what it reads, and nothing held out is trained on."""

import hashlib
import json
from argparse import Namespace

import pytest

from slime.rollout import sft_rollout
from slime.utils.data import Dataset
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from tests.helpers.rollout_args import ListSource
from tools import make_quickstart
from tools.make_quickstart import CHARACTERS, SPECIALS, make_task, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def reloaded(quickstart):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(quickstart / "base")


def rows(directory, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("which", ["tokenizer", "reloaded"])
def test_every_character_is_one_token_and_comes_back(which, request):
    tokenizer = request.getfixturevalue(which)
    ids = [tokenizer.encode(char, add_special_tokens=False) for char in CHARACTERS]
    assert ids == [[len(SPECIALS) + i] for i in range(len(CHARACTERS))]
    assert len(tokenizer) == len(SPECIALS) + len(CHARACTERS) == 52
    text = CHARACTERS[::-1] + "  two spaces , and a comma "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode("A", add_special_tokens=False) == [tokenizer.unk_token_id]


@pytest.mark.parametrize("which", ["tokenizer", "reloaded"])
def test_special_tokens_have_their_roles(which, request):
    tokenizer = request.getfixturevalue(which)
    assert tokenizer.convert_tokens_to_ids(SPECIALS) == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    ids = tokenizer.encode("4<|end|>", add_special_tokens=False)
    assert ids == [len(SPECIALS) + 4, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "4"


@pytest.mark.parametrize("which", ["tokenizer", "reloaded"])
def test_chat_template_is_user_characters_assistant(which, request):
    tokenizer = request.getfixturevalue(which)
    chars = tokenizer.encode("37+58=", add_special_tokens=False)
    answer = tokenizer.encode("95", add_special_tokens=False)
    user = [{"role": "user", "content": "37+58="}]

    def ids(messages, **kwargs):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        return tokenizer.encode(text, add_special_tokens=False)

    assert len(chars) == 6
    assert ids(user) == [3, *chars]
    assert ids(user, add_generation_prompt=True) == [3, *chars, 4]
    assert ids([*user, {"role": "assistant", "content": "95"}]) == [3, *chars, 4, *answer, 1]


def test_supervised_rows_train_the_answer_and_its_end_only(quickstart, reloaded):
    """What SFT does with a row of the file: the prompt and the two role tokens carry no loss."""
    row = rows(quickstart, "sft")[0]
    question, answer = (message["content"] for message in row["messages"])
    tokens, mask = MultiTurnLossMaskGenerator(reloaded, "qwen").get_loss_mask(row["messages"])
    trained = [token for token, flag in zip(tokens, mask, strict=True) if flag]
    assert reloaded.decode(tokens) == f"<|user|>{question}<|assistant|>{answer}<|end|>"
    assert reloaded.decode(trained) == f"{answer}<|end|>" and sum(mask) == len(answer) + 1

    sft_rollout._mask_generator.cache_clear()
    args = Namespace(
        hf_checkpoint=str(quickstart / "base"),
        loss_mask_type="qwen",
        rollout_batch_size=1,
        rollout_max_context_len=None,
    )
    source = ListSource([[Dataset(quickstart / "sft.jsonl", input_key="messages")[0]]])
    (sample,) = sft_rollout.generate_rollout(args, 0, source).samples[0]
    assert (sample.tokens, sample.response_length, sample.loss_mask) == (tokens, len(answer) + 1, [1] * sum(mask))


def test_prompts_of_the_two_files_are_disjoint_and_right(quickstart):
    train, held_out, sft = (rows(quickstart, name) for name in ("train", "heldout", "sft"))
    assert (len(train), len(held_out), len(sft)) == (8100 - 256, 256, 8100 - 256)
    for row in train + held_out:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert len(a) == len(b) == 2 and row["label"] == str(int(a) + int(b))
    prompts = [row["prompt"] for row in train + held_out]
    assert len(set(prompts)) == 8100  # so the two are disjoint, and every pair of numbers is in one of them
    assert {row["messages"][0]["content"] for row in sft} == {row["prompt"] for row in train}


def digests(directory) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_the_seed_decides_every_file(quickstart, tmp_path):
    """Again with the same seed, over what is there already: the same bytes. Another seed: other weights and rows."""
    again = tmp_path / "again"
    (again / "base").mkdir(parents=True)
    (again / "base" / "adapter.json").write_text("left over")
    make_quickstart.main(["--out", str(again), "--seed", "1234"])
    assert digests(again) == digests(quickstart)
    assert make_task(1)["heldout"] != make_task(2)["heldout"]
    make_quickstart.make_checkpoint(tmp_path / "other", seed=5)
    weights = digests(tmp_path / "other")["model.safetensors"]
    assert weights != digests(quickstart)["base/model.safetensors"]


def test_checkpoint_is_a_small_untied_float32_qwen3(quickstart):
    from safetensors.torch import load_file

    config = json.loads((quickstart / "base" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["tie_word_embeddings"] is False
    assert (config["vocab_size"], config["eos_token_id"]) == (52, 1)
    weights = load_file(quickstart / "base" / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}
    assert 0.7e6 < sum(weight.numel() for weight in weights.values()) < 0.9e6
    assert "lm_head.weight" in weights
