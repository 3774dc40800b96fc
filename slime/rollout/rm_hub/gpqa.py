"""Multiple choice: the chosen letter, or the text of the right choice, in a response."""

import re
import string

_DEFAULT_LETTERS = "ABCDEFGHIJ"
# A letter counts only when it stands alone; "a" and "I" before another word are an article and a pronoun.
_ISOLATED = (
    r"(?:\\(?:boxed|text|mathbf)\{|[(\[{*$\"'])*"
    r"(?!a +[A-Za-z])(?![iI] +(?!is\b)[A-Za-z])(?P<letter>[A-Za-z])(?![A-Za-z0-9'])"
)
_STATEMENTS = (
    re.compile(rf"\b(?i:answer|option|choice)\b(?i:\s+is)?\s*:?\s*(?i:option\s+|choice\s+)?{_ISOLATED}"),
    re.compile(r"(?<![A-Za-z0-9'])(?P<letter>[A-Za-z])[)\]}*.]* +(?i:is +(?:the +)?correct)\b"),
    re.compile(rf"\b(?i:final\s+(?:answer|option|choice))\b\W*{_ISOLATED}"),
)
_CAPITAL = re.compile(r"(?<![A-Za-z0-9'])[A-Z](?![A-Za-z0-9'])")


def compute_gpqa_reward(response: str, label: object, metadata: dict | None = None) -> float:
    """1.0 if the response chooses the right answer, else 0.0.

    metadata may hold `valid_letters`, `choices` (list, or dict of letter to text), `correct_letter`, `correct_answer`,
    `answer_text`. Without a known right or chosen letter, the text of the right answer is looked for instead.
    """
    metadata = metadata or {}
    choices = _choices(metadata)
    letters = _valid_letters(metadata, choices)
    correct = _correct_letter(label, metadata, choices, letters)
    answer = response.rpartition("</think>")[2]
    chosen = find_letter(answer, letters)
    if correct is not None and chosen is not None:
        return float(chosen == correct)

    targets = [metadata.get("correct_answer"), metadata.get("answer_text"), label]
    if correct in choices:
        targets.insert(0, choices[correct])
    normalised = _normalise(answer)
    texts = [_normalise(str(target)) for target in targets if target is not None]
    # Whole words; a single letter would be found in any text ("vitamin c").
    if any(f" {text} " in f" {normalised} " for text in texts if text and not re.fullmatch("[a-z]", text)):
        return 1.0
    return float(chosen is not None and chosen == str(label).strip().upper())


def find_letter(text: str, letters: str) -> str | None:
    """The letter a text states as its answer, else the last valid capital standing alone, else None."""
    for statement in _STATEMENTS:
        for match in statement.finditer(text):
            if match["letter"].upper() in letters:
                return match["letter"].upper()
    capitals = [letter for letter in _CAPITAL.findall(text) if letter in letters]
    return capitals[-1] if capitals else None


def _choices(metadata: dict) -> dict[str, str]:
    """Letter -> text of the choice, in order; a dict keeps its own letters where its keys are letters."""
    choices = metadata.get("choices") or {}
    if isinstance(choices, dict):
        if all(len(str(key)) == 1 and str(key).isalpha() for key in choices):
            return {str(key).upper(): str(text) for key, text in choices.items()}
        choices = list(choices.values())
    return {letter: str(text) for letter, text in zip(string.ascii_uppercase, choices, strict=False)}


def _valid_letters(metadata: dict, choices: dict[str, str]) -> str:
    given = metadata.get("valid_letters")
    return "".join(str(letter).upper() for letter in given) if given else "".join(choices) or _DEFAULT_LETTERS


def _correct_letter(label: object, metadata: dict, choices: dict[str, str], letters: str) -> str | None:
    """A number as label is an index from 0 and comes first; then `correct_letter`; then a letter or choice text."""
    if isinstance(label, int | float) and not isinstance(label, bool) and label in range(len(letters)):
        return letters[int(label)]
    if metadata.get("correct_letter"):
        return str(metadata["correct_letter"]).strip().upper()
    text = "" if label is None else str(label).strip()
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    return next(
        (letter for letter, choice in choices.items() if text and _normalise(choice) == _normalise(text)), None
    )


def _normalise(text: str) -> str:
    """Lower case, punctuation as spaces, single spaces."""
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())
