"""Plug-ins that do what they must not, for tests of how a run ends."""

import math
from argparse import Namespace
from typing import Any

from slime.utils.types import Sample

BAD_INDEX = 700


async def nan_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """The length of the response; for one sample, no number."""
    return math.nan if sample.index == BAD_INDEX else float(sample.response_length)


def nan_loss(args: Namespace, batch: dict[str, Any], logits: Any, reducer: Any) -> tuple[Any, dict[str, Any]]:
    """The mean of the logits; in the second step of the second rollout, no number."""
    loss = logits.mean() * (math.nan if batch["step_name"] == "rollout 1 step 1" else 1.0)
    return loss, {"loss": loss.detach()}
