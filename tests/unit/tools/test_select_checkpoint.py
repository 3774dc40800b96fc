"""Choosing a warm-up checkpoint: the best one under the limit, judged by what it really answers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools import select_checkpoint
from tools.select_checkpoint import by_number, sampled_accuracy, select


def test_the_best_under_the_limit_is_chosen():
    accuracies = {Path("0"): 0.1, Path("1"): 0.38, Path("2"): 0.3, Path("3"): 0.45}
    assert select(accuracies, below=0.42) == Path("1")
    assert select(accuracies, below=1.0) == Path("3")
    assert select({Path("0"): 0.6, Path("1"): 0.5}, below=0.42) == Path("1")


def test_candidates_are_taken_in_number_order():
    assert sorted(map(Path, ("10", "9", "0", "100")), key=by_number) == [Path(n) for n in ("0", "9", "10", "100")]


def always_answering(checkpoint: Path, target: Path, characters: list[int]) -> None:
    """A copy of the checkpoint whose output layer has a large bias-like row for `characters`: it says one of them."""
    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    for name in weights:
        if name.endswith("mlp.down_proj.weight") or name.endswith("o_proj.weight"):
            weights[name] = torch.zeros_like(weights[name])  # the residual stream keeps the embedding
    weights["model.embed_tokens.weight"] = torch.ones_like(weights["model.embed_tokens.weight"])
    weights["lm_head.weight"][characters] = 10.0
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def test_accuracy_is_the_share_of_exact_answers(quickstart, tmp_path, capsys):
    """A checkpoint that ends its answer at once is right exactly where the label is empty; one that says "7" or ends,
    each half of the time, is right where the label is empty half of the time."""
    end, seven = 1, 5 + 7
    always_answering(quickstart / "base", tmp_path / "c" / "0", [end])
    always_answering(quickstart / "base", tmp_path / "c" / "1", [end, seven])
    prompts, labels = ["1+1="] * 200, [""] * 150 + ["8"] * 50
    assert sampled_accuracy(tmp_path / "c" / "0", prompts, labels) == 0.75
    assert 0.25 < sampled_accuracy(tmp_path / "c" / "1", prompts, labels) < 0.5

    rows = [{"prompt": p, "label": label} for p, label in zip(prompts, labels, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--candidates", str(tmp_path / "c"), "--prompts", str(tmp_path / "rows.jsonl"), "--out"]
    select_checkpoint.main([*arguments, str(tmp_path / "chosen"), "--below", "0.6"])
    assert "chosen: " + str(tmp_path / "c" / "1") in capsys.readouterr().out
    chosen = load_file(tmp_path / "chosen" / "model.safetensors")
    assert chosen["lm_head.weight"][seven].min() == 10.0

    with pytest.raises(SystemExit):
        select_checkpoint.main([*arguments, str(tmp_path / "chosen")])
    assert "remove it first" in capsys.readouterr().err
