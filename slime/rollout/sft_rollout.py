"""Supervised fine-tuning: turns conversations of the dataset into samples with a loss mask, without generating
anything.
"""

import logging
from argparse import Namespace
from functools import cache

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import DataSource
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """`rollout_batch_size` groups of one sample each, reward 0; the response runs from the first trained token to the
    end.

    The prompt must be a message list (no --apply-chat-template); tools come from metadata["tools"]. Rows without a
    trained token, or with more than --rollout-max-context-len tokens, are left out, counted in
    rollout/sft/dropped_no_trained_token and rollout/sft/dropped_too_long, and replaced by the next rows. Raises
    ValueError when a whole epoch has no usable row.
    """
    if evaluation:
        raise ValueError("SFT has no evaluation of its own: give an --eval-function-path or drop --eval-interval")
    generator = _mask_generator(args.hf_checkpoint, args.loss_mask_type)
    kept: list[list[Sample]] = []
    dropped = {"no_trained_token": 0, "too_long": 0}
    drops_in_a_row = 0
    while len(kept) < args.rollout_batch_size:
        groups = data_source.get_samples(args.rollout_batch_size - len(kept))
        if not groups:
            raise ValueError(
                f"the data source is empty after {len(kept)} of --rollout-batch-size {args.rollout_batch_size} rows"
            )
        for group in groups:
            reason = _fill(args, generator, group)
            if reason is None:
                kept.append(group)
                drops_in_a_row = 0
                continue
            dropped[reason] += 1
            drops_in_a_row += 1
        if drops_in_a_row >= max(len(data_source), 1):
            raise ValueError(
                f"no usable row among {drops_in_a_row} in a row, a whole epoch: dropped {dropped} "
                f"(--rollout-max-context-len {args.rollout_max_context_len}, --loss-mask-type {args.loss_mask_type})"
            )
    if any(dropped.values()):
        logger.warning("rollout %d: left out rows: %s", rollout_id, dropped)
    metrics = {f"rollout/sft/dropped_{reason}": count for reason, count in dropped.items() if count}
    return RolloutFnTrainOutput(samples=kept, metrics=metrics)


def _fill(args: Namespace, generator: MultiTurnLossMaskGenerator, group: list[Sample]) -> str | None:
    """Give the group's one sample its tokens and mask; the reason when it cannot be trained on."""
    if len(group) != 1:
        raise ValueError(f"SFT trains on each row once: --n-samples-per-prompt must be 1, got groups of {len(group)}")
    sample = group[0]
    if not isinstance(sample.prompt, list):
        raise ValueError(
            f"SFT row {sample.index}: the prompt must be a message list; drop --apply-chat-template (got "
            f"{sample.prompt!r:.100})"
        )
    tokens, mask = generator.get_loss_mask(sample.prompt, tools=sample.metadata.get("tools"))
    if 1 not in mask:
        return "no_trained_token"
    if args.rollout_max_context_len is not None and len(tokens) > args.rollout_max_context_len:
        return "too_long"
    start = max(mask.index(1), 1)  # the first token has nothing before it to be predicted from
    sample.tokens = list(tokens)
    sample.response_length = len(tokens) - start
    sample.loss_mask = list(mask[start:])
    sample.reward = 0
    return None if any(sample.loss_mask) else "no_trained_token"


@cache
def _mask_generator(hf_checkpoint: str, loss_mask_type: str) -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(load_tokenizer(hf_checkpoint), loss_mask_type)
