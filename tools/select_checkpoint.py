r"""Chooses among the checkpoints of a supervised warm-up the best one that still leaves something to learn.

    python tools/select_checkpoint.py --candidates outputs/quickstart/warm-up \
        --prompts outputs/quickstart/train.jsonl@[0:512] --below 0.42 --out outputs/quickstart/sft-hf

samples an answer to every prompt at temperature 1 and copies the checkpoint with the highest accuracy under --below.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from slime.utils.data import read_file


def sampled_accuracy(checkpoint: Path, prompts: Sequence[str], labels: Sequence[str], seed: int = 0) -> float:
    """Share of prompts that the checkpoint answers with exactly the label, one sample each at temperature 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(seed)
    longest = max(len(tokenizer.encode(label, add_special_tokens=False)) for label in labels)
    output = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=longest + 1)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(answer == label for answer, label in zip(answers, labels, strict=True)) / len(labels)


def select(accuracies: dict[Path, float], below: float) -> Path:
    """The checkpoint with the highest accuracy under `below`; the least accurate one if none is under it."""
    under = {path: accuracy for path, accuracy in accuracies.items() if accuracy < below}
    return max(under, key=under.get) if under else min(accuracies, key=accuracies.get)


def by_number(path: Path) -> tuple[int, str]:
    """Sort key that puts 9 before 10."""
    return len(path.name), path.name


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=Path, required=True, help="directory of checkpoint directories")
    parser.add_argument("--prompts", required=True, help="jsonl with prompt and label; path@[a:b] takes a slice")
    parser.add_argument("--below", type=float, default=1.0, help="take the best accuracy under this")
    parser.add_argument("--out", type=Path, required=True, help="where the chosen checkpoint is copied to")
    args = parser.parse_args(argv)
    candidates = sorted((path.parent for path in args.candidates.glob("*/config.json")), key=by_number)
    if not candidates:
        parser.error(f"--candidates {args.candidates}: no directory with a config.json in it")
    if args.out.exists():
        parser.error(f"--out {args.out} exists; remove it first")
    rows = list(read_file(args.prompts))
    prompts, labels = [row["prompt"] for row in rows], [row["label"] for row in rows]
    accuracies = {}
    for path in candidates:
        accuracies[path] = sampled_accuracy(path, prompts, labels)
        print(f"{path}: {accuracies[path]:.3f}", flush=True)
    chosen = select(accuracies, args.below)
    shutil.copytree(chosen, args.out)
    print(f"chosen: {chosen} ({accuracies[chosen]:.3f}) -> {args.out}")


if __name__ == "__main__":
    main()
