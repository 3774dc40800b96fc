"""Token F1 of short answers, as the SQuAD evaluation defines it."""

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = ("yes", "no", "noanswer")


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    words = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join(words.split())


def f1_score(prediction: str, ground_truth: str) -> float:
    """Harmonic mean of token precision and recall in [0, 1].

    yes / no / noanswer is right or wrong: 0 if either side is one of them and the other differs.
    """
    predicted, truth = normalize_answer(prediction), normalize_answer(ground_truth)
    if predicted != truth and (predicted in _CLOSED_ANSWERS or truth in _CLOSED_ANSWERS):
        return 0.0
    predicted_tokens, truth_tokens = predicted.split(), truth.split()
    common = sum((Counter(predicted_tokens) & Counter(truth_tokens)).values())
    return 2 * common / (len(predicted_tokens) + len(truth_tokens)) if common else 0.0
