"""A checkpoint directory quantised, or cast back to bfloat16: what the tools do once they know what is meant."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from slime.backends.megatron_utils.megatron_to_hf.processors.checkpoint import (
    DequantizeRule,
    QuantizeRule,
    edge_blocks,
    has_routed_experts,
)
from slime.backends.megatron_utils.megatron_to_hf.processors.formats import Format
from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4
from slime.backends.megatron_utils.megatron_to_hf.processors.selection import ROUTED_EXPERTS_ONLY
from slime.utils.convert_checkpoint import Summary, convert_checkpoint
from slime.utils.safetensors_io import CheckpointDirectory, CheckpointError

logger = logging.getLogger(__name__)


def quantize_directory(
    source: Path,
    target: Path,
    format: Format,
    ignore: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    max_workers: int = 1,
    force: bool = False,
) -> Summary:
    """The bfloat16 directory `source` as `target` in the format. See convert_checkpoint for resuming and force.

    ignore: rules of modules to leave alone. None: for INT4 everything but routed experts where a model has those,
    else nothing. CheckpointError for all that a user can mend.
    """
    checkpoint = CheckpointDirectory(source)
    if ignore is None:
        ignore = ROUTED_EXPERTS_ONLY if isinstance(format, PackedInt4) and has_routed_experts(checkpoint) else ()
    rule = _named(lambda: QuantizeRule(checkpoint, format, ignore, device))
    _tell(rule, checkpoint, format)
    return convert_checkpoint(
        checkpoint,
        target,
        rule,
        rule.config,
        settings={"format": repr(format), "ignore": list(ignore)},
        max_workers=max_workers,
        force=force,
    )


def dequantize_directory(
    source: Path,
    target: Path,
    *,
    config_path: Path | None = None,
    only: Sequence[str] | None = None,
    device: str = "cpu",
    max_workers: int = 1,
    force: bool = False,
) -> Summary:
    """The quantised directory `source` as `target` in bfloat16. See convert_checkpoint for resuming, force and only.

    config_path: another config.json. CheckpointError for all that a user can mend.
    """
    checkpoint = CheckpointDirectory(source, config_path)
    rule = _named(lambda: DequantizeRule(checkpoint, device))
    return convert_checkpoint(
        checkpoint,
        target,
        rule,
        rule.config,
        settings={"to": "bfloat16"},
        max_workers=max_workers,
        force=force,
        only=only,
    )


def _named[T](make: Callable[[], T]) -> T:
    try:
        return make()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _tell(rule: QuantizeRule, source: CheckpointDirectory, format: Format) -> None:
    """What a user should know before hours of work."""
    logger.info("%d weights become %s, %d matrices stay as they are", len(rule.quantized), format, len(rule.kept))
    if rule.unknown:
        logger.warning("%d matrices have unknown names and stay, e.g. %s", len(rule.unknown), rule.unknown[0])
    edges = edge_blocks(rule, source, format) if isinstance(format, BlockFp8) else []
    if edges:
        logger.warning(
            "%d weights are no multiples of the block, e.g. %s %s: SGLang refuses such sides where it splits or fuses "
            "the layer; transformers misreads them when it loads to bfloat16",
            len(edges),
            edges[0],
            list(source.info(edges[0]).shape),
        )
