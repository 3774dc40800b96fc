"""A reward for addition that gives part of the credit for part of the digits, for `--custom-rm-path`."""

import re
from argparse import Namespace
from typing import Any

from slime.utils.types import Sample

PARTIAL_CREDIT = 0.5  # the most that a wrong answer can get
LATER_ANSWER = 0.5  # factor for every answer that was needed before the last one


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """The credit of the last answer, halved for each answer before it. A list of samples gets a list of rewards.

    The answers are `metadata["answers"]`, where generate.py leaves them, or else the one response.
    """
    if isinstance(sample, list):
        return [score(one) for one in sample]
    return score(sample)


def score(sample: Sample) -> float:
    """Reward of one sample, within [0, 1]."""
    answers = sample.metadata.get("answers") or [sample.response]
    return credit(answers[-1], str(sample.label)) * LATER_ANSWER ** (len(answers) - 1)


def credit(answer: str, label: str) -> float:
    """1 for the right number; for a wrong number of the right length, 0.5 x the share of right digits; else 0.

    answer: the model's text, of which the number it starts with counts. label: the digits of the right number.
    """
    number = re.match(r"\s*(\d+)", answer)
    if number is None or len(number[1]) != len(label):
        return 0.0
    right = sum(a == b for a, b in zip(number[1], label, strict=True))
    return 1.0 if right == len(label) else PARTIAL_CREDIT * right / len(label)
