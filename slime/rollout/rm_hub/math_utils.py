r"""Grading of mathematical answers: `\boxed` extraction, two normal forms, and equality by value.

Model output is data here: expressions go through `expression.py`, which knows numbers, letters and arithmetic only.
The normal forms follow the public Hendrycks-MATH and PRM800K graders.
"""

import re
from decimal import Decimal

from slime.rollout.rm_hub.expression import equal_in_value

_OPENERS = ("\\boxed", "\\fbox")
MAX_ANSWER_LENGTH = 500  # characters; a longer answer is compared as text only

# ---- extraction ----


def last_boxed_only_string(text: str) -> str | None:
    r"""The last `\boxed{...}` (else `\fbox{...}`) of a text with its braces balanced, or None."""
    for opener in _OPENERS:
        start = text.rfind(opener)
        if start >= 0:
            end = _closing_brace(text, start + len(opener))
            return None if end is None else text[start : end + 1]
    return None


def remove_boxed(boxed: str) -> str | None:
    r"""The content of exactly `\boxed{...}` or `\fbox{...}`; None for any other form, e.g. `\boxed 5`."""
    for opener in _OPENERS:
        if boxed.startswith(opener + "{") and boxed.endswith("}"):
            return boxed[len(opener) + 1 : -1]
    return None


def extract_boxed_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` (else `\fbox{...}`), or None."""
    boxed = last_boxed_only_string(text)
    return None if boxed is None else remove_boxed(boxed)


def extract_answer(text: str) -> str | None:
    r"""The answer a response gives: `extract_boxed_answer`. None means that it gives none."""
    return extract_boxed_answer(text)


def _closing_brace(text: str, start: int) -> int | None:
    """Position of the brace that closes the first one opened from `start` on."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth <= 0:
                return position if depth == 0 else None
    return None


# ---- grading ----


def grade_answer_verl(response: str, label: object) -> bool:
    r"""Whether the response's boxed answer equals the label. False without a label or without a box."""
    answer = extract_answer(response)
    return answer is not None and grade_answer(answer, label)


def grade_answer(answer: str, label: object) -> bool:
    r"""Whether an extracted answer equals the label, as text in normal form or in value. An empty label is never met.

    A label that contains a box means the box's content.
    """
    truth = label_text(label)
    if not truth:
        return False
    return grade_answer_mathd(answer, truth) or grade_answer_sympy(answer, truth)


def label_text(label: object) -> str:
    r"""The ground truth as text, unboxed; "" if there is none (None, "", an unreadable box). 0 is the label "0"."""
    if label is None:
        return ""
    text = str(label).strip()
    return (extract_boxed_answer(text) or "") if "\\boxed" in text else text


def grade_answer_mathd(answer: str, truth: str) -> bool:
    """Equality of the Hendrycks-MATH normal forms."""
    return mathd_normal_form(answer) == mathd_normal_form(truth)


def grade_answer_sympy(answer: str, truth: str) -> bool:
    """Equality in value, element by element for bracketed lists. False whenever a side cannot be read.

    Plain fractions must agree as text (an unreduced one is not an answer), and an integer only equals an integer.
    """
    if max(len(answer), len(truth)) > MAX_ANSWER_LENGTH:
        return False
    given, wanted = value_normal_form(answer), value_normal_form(truth)
    if not given:
        return False
    if given == wanted:
        return True
    given_parts, wanted_parts = _elements(given), _elements(wanted)
    if len(given_parts) != len(wanted_parts):
        return False
    if len(wanted_parts) > 1 and (given[0], given[-1]) != (wanted[0], wanted[-1]):
        return False
    return all(_same_element(g, w) for g, w in zip(given_parts, wanted_parts, strict=True))


def _same_element(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if _is_fraction(given) and _is_fraction(wanted):
        return False
    if _is_integer(given) != _is_integer(wanted):
        return False
    return equal_in_value(given, wanted)


def _is_fraction(text: str) -> bool:
    return re.fullmatch(r"-?\(?\d+\)?/\(?0*[1-9]\d*\)?", text) is not None


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", text) is not None


def _elements(text: str) -> list[str]:
    """`(1,2]` -> ["1", "2"], commas inside inner brackets do not split; text that no pair of brackets spans is one."""
    if len(text) <= 2 or text[0] not in "([" or text[-1] not in ")]":
        return [text]
    elements, depth = [""], 0
    for character in text[1:-1]:
        depth += (character in "([") - (character in ")]")
        if depth < 0:  # the first bracket closes before the end
            return [text]
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


# ---- normal forms ----


def mathd_normal_form(answer: str) -> str:
    """Text normal form of the Hendrycks-MATH grader."""
    text = _unwrap_text(answer.strip())
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text = text.split("\\text{ ")[0]  # a unit on the right
    text = text.replace("\\%", "")
    text = re.sub(r"(^|[ {])\.(?=\d)", r"\g<1>0.", text)
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left.strip()) <= 2:
        text = right
    text = text.replace(" ", "")
    text = re.sub(r"\\sqrt([^{\[])", r"\\sqrt{\1}", text)
    text = _brace_fractions(text)
    if text == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def _brace_fractions(text: str) -> str:
    r"""`\frac12` and its half-braced variants as `\frac{1}{2}`."""
    text = re.sub(r"\\frac([^{\\])", r"\\frac{\1}", text)
    return re.sub(r"\\frac(\{[^{}]*\})([^{\\])", r"\\frac\1{\2}", text)


def _unwrap_text(text: str) -> str:
    r"""Content of a `\text{...}` that is the whole string."""
    match = re.fullmatch(r"\\text\{(.+)\}", text, flags=re.DOTALL)
    return match[1].strip() if match and _closing_brace(text, len("\\text")) == len(text) - 1 else text


_UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
# Whole words only: "5 meters", "5cm", not the "meter" of "parameter".
_UNIT = re.compile(rf"(?<![a-zA-Z\\])(?:{_UNITS})(?:es|s)?(?![a-zA-Z]) *(?:\^\{{?[0-9]+\}}?)?")
_POWERS_OF_TEN = {"million": 6, "billion": 9, "trillion": 12}
_POWER_OF_TEN = re.compile(rf"(\d+(?:\.\d+)?) *({'|'.join(_POWERS_OF_TEN)})s?")


def value_normal_form(answer: str) -> str:
    """Plain-text normal form for comparison in value: lower case, no spaces or braces, LaTeX written as arithmetic."""
    text = _unwrap_text(answer.strip())
    text = re.sub(r"\\?[%$]", "", text)
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<=\d)(?:,|\{,\}|,\\!)(?=\d{3}(?:\D|$))", "", text)
    text = _POWER_OF_TEN.sub(lambda m: f"{Decimal(m[1]).scaleb(_POWERS_OF_TEN[m[2]]):f}", text)
    text = _UNIT.sub("", text)
    text = re.sub(r"\^ *\{? *\\circ *\}?", "", text).strip()
    if "\\" in text or "{" in text:
        text = _latex_to_text(text)
    text = re.sub(r"(?<![\w.)/^])(\d+) +(\d+)/(\d+)", r"(\1+\2/\3)", text)  # mixed numbers: 7 3/4
    text = re.sub(r"(?<![\w.)/^])(\d+) *\(\((\d+)\)/\((\d+)\)\)", r"(\1+\2/\3)", text)  # 7\frac{3}{4}
    text = re.sub(r"(?<![\w.])(\d+)\.0*(?![\d.])", r"\1", text)
    text = re.sub(r"[\s{}]", "", text.lower())
    return re.sub(r"(?<![\w^)/])\(\((\d+)\)/\((\d+)\)\)(?![\w^(!])", r"\1/\2", text)


_LATEX_WORDS = {
    "cdot": "*",
    "times": "*",
    "div": "/",
    "pi": "pi",
    "infty": "inf",
    "cup": "U",
    "left": "",
    "right": "",
    "ln": "ln",
    "quad": " ",
}
_LATEX_FORMS = (
    (re.compile(r"\\frac *\{([^{}]*)\} *\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt *\[([^\[\]{}]*)\] *\{([^{}]*)\}"), r"root(\1,\2)"),
    (re.compile(r"\\sqrt *\{([^{}]*)\}"), r"sqrt(\1)"),
    (re.compile(r"\^ *\{(-?\w)\}"), r"^\1"),
    (re.compile(r"\^ *\{([^{}]*)\}"), r"^(\1)"),
)


def _latex_to_text(text: str) -> str:
    r"""Fractions, roots, exponents and the words of `_LATEX_WORDS` as plain arithmetic, from the innermost out."""
    text = re.sub(r"\\[,;:! ]", " ", text).replace("\\{", "(").replace("\\}", ")")
    text = re.sub(r"\\[td]frac", r"\\frac", text)
    text = re.sub(r"\\sqrt *([^{\[\\ ])", r"\\sqrt{\1}", text)
    text = _brace_fractions(re.sub(r"\\frac +", r"\\frac", text))
    before = None
    while text != before:  # each round removes a level of nesting
        before = text
        for pattern, form in _LATEX_FORMS:
            text = pattern.sub(form, text)
    for word, plain in _LATEX_WORDS.items():
        text = re.sub(rf"\\{word}(?![a-zA-Z])", plain, text)
    return text
