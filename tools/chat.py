"""Talk to a Hugging Face checkpoint in the terminal, on a GPU or the CPU.

python tools/chat.py outputs/quickstart/final                    # a conversation; Ctrl-D ends it
python tools/chat.py outputs/quickstart/final --prompt '37+58='  # one answer
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="directory with config.json, weights and tokenizer")
    parser.add_argument("--prompt", help="answer this and exit")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--keep-history", action="store_true", help="send earlier turns along (default: each alone)")
    args = parser.parse_args(argv)
    if not (args.checkpoint / "config.json").is_file():
        parser.error(f"{args.checkpoint} has no config.json: not a Hugging Face checkpoint directory")
    if args.temperature < 0:
        parser.error(f"--temperature {args.temperature}: must be >= 0 (0 takes the likeliest token)")

    answer = load(args)
    if args.prompt is not None:
        answer([{"role": "user", "content": args.prompt}])
        return
    history: list[dict[str, str]] = []
    while (line := read_line()) is not None:
        history = (history if args.keep_history else []) + [{"role": "user", "content": line}]
        history.append({"role": "assistant", "content": answer(history)})


def load(args: argparse.Namespace) -> Callable[[list[dict[str, str]]], str]:
    """A function that prints the answer to a message list as it is generated, and returns it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype="auto").to(device).eval()
    sampling = {"do_sample": args.temperature > 0} | ({"temperature": args.temperature} if args.temperature else {})

    def answer(messages: list[dict[str, str]]) -> str:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(device)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        output = model.generate(**inputs, max_new_tokens=args.max_new_tokens, streamer=streamer, **sampling)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def read_line() -> str | None:
    """The next line a person types, None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


if __name__ == "__main__":
    main()
