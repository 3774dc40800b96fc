"""Ready-made dynamic sampling filters: `--dynamic-sampling-filter-path
slime.rollout.filter_hub.dynamic_sampling_filters.<name>`.
"""

import dataclasses
import statistics
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import flatten_samples
from slime.rollout.filter_hub.base_types import DynamicFilterOutput


def check_reward_nonzero_std(args: Namespace, group: list, **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ (unbiased std > 1e-6, float64): equal rewards have no group advantage.

    group: samples, or lists of samples where executions were split; every sample counts once.
    """
    rewards = [float(sample.get_reward_value(args)) for sample in flatten_samples([group])]
    if len(rewards) > 1 and statistics.stdev(rewards) > 1e-6:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Namespace, group: list, **kwargs: Any) -> DynamicFilterOutput:
    """As check_reward_nonzero_std, but a dropped group is kept when the batch could not be filled without it."""
    return dataclasses.replace(check_reward_nonzero_std(args, group), keep_when_insufficient=True)
