"""A reward that a model with random weights learns in a few steps, for `--custom-rm-path`: words of the first half of
the vocabulary, please."""

from argparse import Namespace
from typing import Any

from slime.utils.types import Sample


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """The share of response tokens whose id is below the label, in [0, 1]. A list of samples gets a list."""
    if isinstance(sample, list):
        return [share_below(one) for one in sample]
    return share_below(sample)


def share_below(sample: Sample) -> float:
    """The reward of one sample; 0 for an empty response."""
    if not sample.response_length:
        return 0.0
    boundary = int(sample.label)
    return sum(token < boundary for token in sample.tokens[-sample.response_length :]) / sample.response_length
