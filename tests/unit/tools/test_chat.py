"""Talking to a checkpoint: what is printed is what the model says, and each line is its own conversation."""

import io
import sys

import pytest

from tools import chat


def greedy(directory, prompt: str, count: int) -> str:
    """The likeliest continuation, token by token without a cache."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = tokenizer.encode(f"<|user|>{prompt}<|assistant|>", add_special_tokens=False)
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + count and ids[-1] != tokenizer.eos_token_id:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_one_answer_is_the_likeliest_continuation(quickstart, capsys):
    chat.main([str(quickstart / "base"), "--prompt", "37+58=", "--max-new-tokens", "9"])
    assert capsys.readouterr().out == greedy(quickstart / "base", "37+58=", 9) + "\n"


def test_sampling_follows_the_temperature(quickstart, capsys):
    """Near temperature 0 samples are the likeliest tokens; at 100 the tokens are nearly uniform."""
    answers = []
    for temperature in ("1e-4", "100"):
        chat.main(
            [str(quickstart / "base"), "--prompt", "1+1=", "--temperature", temperature, "--max-new-tokens", "12"]
        )
        answers.append(capsys.readouterr().out.rstrip("\n"))
    expected = greedy(quickstart / "base", "1+1=", 12)
    assert answers[0] == expected != answers[1]


def conversation(monkeypatch, tmp_path, *flags) -> list[list[str]]:
    """The message contents of each request while a person types three lines."""
    (tmp_path / "config.json").write_text("{}")
    seen = []

    def load(args):
        def answer(messages):
            seen.append([message["content"] for message in messages])
            return f"answer {len(seen)}"

        return answer

    monkeypatch.setattr(chat, "load", load)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\nthree\n"))
    chat.main([str(tmp_path), *flags])
    return seen


def test_each_line_stands_alone_unless_history_is_kept(monkeypatch, tmp_path):
    assert conversation(monkeypatch, tmp_path) == [["one"], ["two"], ["three"]]
    kept = conversation(monkeypatch, tmp_path, "--keep-history")
    assert kept[1] == ["one", "answer 1", "two"] and kept[2] == [*kept[1], "answer 2", "three"]


@pytest.mark.parametrize("flags, says", [([], "no config.json"), (["--temperature", "-1"], "must be >= 0")])
def test_user_errors_end_the_command_with_a_sentence(tmp_path, capsys, flags, says):
    if flags:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        chat.main([str(tmp_path), *flags])
    assert stop.value.code == 2 and says in capsys.readouterr().err
