r"""The DAPO grader: the last `Answer: ...` line (or a strict `\boxed`), compared as text after Minerva normalisation.

The word lists and their order are those of the Minerva / lm-evaluation-harness normalisation.
"""

import re
from decimal import Decimal, InvalidOperation

from slime.rollout.rm_hub.math_utils import label_text, last_boxed_only_string, remove_boxed

INVALID = "[INVALID]"
_WINDOW, _STRICT_WINDOW = 300, 100  # characters at the end of the response that are looked at

_REPLACEMENTS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_DELETIONS = (
    *"square ways integers dollars mph inches hours km units".split(),
    "\\ldots",
    *"sue points feet minutes digits cents degrees cm gm pounds meters meals edges students".split(),
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
    "<|im_end|>",
    "<|endoftext|>",
)


def compute_score(
    solution: str,
    ground_truth: object,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict:
    r"""{"score": 1.0 or -1.0, "acc": whether the answer is right, "pred": the answer that was found}.

    Default: last 300 characters, last "Answer:" line, both sides normalised; a label that is an integral number is
    compared as that integer, any other as text. strict_box_verify: last 100 characters (from 100 before the fourth
    pause token, if their positions are given), content of the last `\boxed{}` compared verbatim.
    """
    if strict_box_verify:
        start = pause_tokens_index[-1] - _STRICT_WINDOW if pause_tokens_index else -_STRICT_WINDOW
        boxed = last_boxed_only_string(solution[start:])
        pred = remove_boxed(boxed) if boxed else None
        correct = pred is not None and pred == str(ground_truth)
    else:
        matches = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", solution[-_WINDOW:])
        pred = normalize_final_answer(matches[-1]) if matches else INVALID
        correct = same_answer(pred, ground_truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred if pred is not None else INVALID}


def same_answer(normalised: str, label: object) -> bool:
    """Whether an already normalised answer equals the label; an empty label is never met."""
    truth = label_text(label)
    if not truth:
        return False
    try:
        number = Decimal(truth)
    except InvalidOperation:
        number = None
    if number is not None and number.is_finite() and number == number.to_integral_value():
        return normalised == str(int(number))
    return normalised == normalize_final_answer(truth)


def normalize_final_answer(answer: str) -> str:
    """Minerva normal form of an answer."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    for word in _DELETIONS:
        text = text.replace(word, "")
    text = re.sub(r"^.*?\$(.*?)\$.*$", r"$\1$", text, flags=re.DOTALL)
    text = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text
