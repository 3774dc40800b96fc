"""The value head: what makes a critic of a language model, and how checkpoints of either kind are loaded into it.

A critic is the model of a trainer whose loss is value_loss; everything else about it is the policy's model.
"""

import contextlib
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

logger = logging.getLogger(__name__)

DEFAULT_STD = 0.02
_NAME = "output_layer"
_KEYS = (f"{_NAME}.weight", f"{_NAME}.bias")


def is_critic(args: Namespace) -> bool:
    """Whether the trainer of these arguments trains a critic."""
    return getattr(args, "loss_type", None) == "value_loss"


class ValueHead(nn.Linear):
    """V = w h + b of every position, in float32, in the place of the vocabulary's output layer.

    Every tensor-parallel rank holds and computes the whole head, so neither its gradient nor that of its input is
    reduced over them. The weight is drawn from N(0, std^2) by a generator of its own, which makes it the same in every
    layout; the bias starts at 0.
    """

    def __init__(self, config: TransformerConfig, seed: int, device: torch.device) -> None:
        super().__init__(config.hidden_size, 1, bias=True, device=device, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        self.may_be_absent = False
        std = DEFAULT_STD if config.init_method_std is None else config.init_method_std
        with torch.no_grad():
            self.weight.copy_(torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(seed)) * std)
            self.bias.zero_()

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """hidden: [S, B, H], with sequence parallelism this rank's part of S. Returns (values [S, B, 1], None).

        The other arguments are those of the layer it replaces, and mean nothing here.
        """
        if self.sequence_parallel:
            # Every rank goes on with the whole sequence: the gradient is cut, not summed.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()), None

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if not self.may_be_absent:
            super()._load_from_state_dict(state_dict, prefix, *args)


def attach_value_head(args: Namespace, model: nn.Module, post_process: bool) -> None:
    """Make a critic of one (virtual) stage's model, before DDP sees it: a value head on the last stage, which trains
    whatever the lists of frozen parameters say."""
    model.share_embeddings_and_output_weights = False
    if post_process:
        setattr(model, _NAME, ValueHead(model.config, args.seed, next(model.parameters()).device))


@contextlib.contextmanager
def loading_value_head(model: Sequence[nn.Module], checkpoint: Path, resume: bool) -> Iterator[None]:
    """Load a Megatron checkpoint inside; a value head that it lacks keeps its values.

    model: this rank's chunks, of a critic or not. checkpoint: the iteration's directory. resume: the checkpoint must
    be a critic's, for its optimizer's state is wanted too. Raises ValueError when it then has no value head.
    """
    chunks = [chunk for chunk in map(unwrap_model, model) if isinstance(getattr(chunk, _NAME, None), ValueHead)]
    if not chunks or has_value_head(checkpoint):
        yield
        return
    if resume:
        raise ValueError(
            f"the critic cannot go on from {checkpoint}: it has no value head, so it is no critic's; "
            "set finetune: true in the critic's overrides (--megatron-config-path) to take its weights alone"
        )
    logger.info("%s has no value head: the critic starts with a new one", checkpoint)
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(_without_head(chunk))
        yield


def has_value_head(checkpoint: Path) -> bool:
    """Whether a Megatron checkpoint's output layer is one row with a bias."""
    stored = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    return all(key in stored and stored[key].global_shape[0] == 1 for key in _KEYS)


@contextlib.contextmanager
def _without_head(chunk: nn.Module) -> Iterator[None]:
    """The chunk neither asks a checkpoint for its value head nor misses it when it is filled."""
    whole, head = chunk.sharded_state_dict, getattr(chunk, _NAME)

    def others(prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = whole(prefix, *args, **kwargs)
        return {key: value for key, value in state.items() if key not in [prefix + name for name in _KEYS]}

    chunk.sharded_state_dict, head.may_be_absent = others, True
    try:
        yield
    finally:
        del chunk.sharded_state_dict
        head.may_be_absent = False
