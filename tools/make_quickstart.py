"""Makes everything the quickstart trains on: a tiny randomly initialised Qwen3 checkpoint with a character tokenizer,
and two-digit addition as SFT conversations, RL prompts with labels, and held-out prompts.

    python tools/make_quickstart.py --out outputs/quickstart --seed 1234

writes <out>/base (Hugging Face checkpoint, 0.8 M parameters, fp32) and <out>/{sft,train,heldout}.jsonl.
"""

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*=? abcdefghijklmnopqrstuvwxyz.,:!'"
PAD, END, UNKNOWN, USER, ASSISTANT = SPECIALS = ["<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_HELD_OUT = 256


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """One token a character, plus the special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_checkpoint(directory: Path, seed: int) -> None:
    """A Qwen3 of 4 layers, hidden 128, random weights from `seed`, and its tokenizer, as a Hugging Face checkpoint."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_task(seed: int) -> dict[str, list[dict]]:
    """The rows of the three files. A pair of numbers is in exactly one of training and held-out data.

    Returns {"sft": [{"messages": [...]}], "train": [{"prompt", "label"}], "heldout": [{"prompt", "label"}]}.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs]
    held_out, train = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT:]
    conversations = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["label"]}]}
        for row in train
    ]
    return {"sft": conversations, "train": train, "heldout": held_out}


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to; files there are replaced")
    parser.add_argument("--seed", type=int, default=1234, help="of the weights and of the split")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.out / "base", ignore_errors=True)
    make_checkpoint(args.out / "base", args.seed)
    for name, rows in make_task(args.seed).items():
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.out / name}.jsonl: {len(rows)} rows")
    print(f"{args.out / 'base'}: tiny Qwen3 checkpoint")


if __name__ == "__main__":
    main()
