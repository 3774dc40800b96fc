"""What the last pipeline stage returns instead of logits: hidden states and the head that would score them.

Losses make log-probabilities of both in chunks; whole logits exist only where a user's loss asks for them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

_NO_LOGIT = -1e9


@dataclass(frozen=True, eq=False)
class HeadScores:
    """`loss.log_probs.Scores` of a GPT model.

    hidden: [T, 1, H], or [T / tp, 1, H] with sequence parallelism. weight: [V / tp, H], the output layer's own or the
    embedding's. gradient_placeholder: see `vocab_parallel_log_probs`.
    """

    hidden: Tensor
    output_layer: ColumnParallelLinear
    weight: Tensor
    vocab_size: int
    gradient_placeholder: bool

    @property
    def device(self) -> torch.device:
        """Where Megatron's schedule puts loss scales."""
        return self.hidden.device

    def projection(self) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states [T, H], the same on all tensor-parallel ranks, and their head. Collective with tp > 1."""
        for hook in self.output_layer._forward_pre_hooks.values():
            hook(self.output_layer, ())  # the distributed optimizer's: wait until the weight is gathered
        if self.output_layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(self.hidden, group=self.output_layer.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(self.hidden, group=self.output_layer.tp_group)
        head = {
            "weight": self.weight,
            "vocab_size": self.vocab_size,
            "gradient_placeholder": self.gradient_placeholder,
        }
        return hidden.squeeze(1), head

    def logits(self) -> Tensor:
        """[1, T, V / tp] float32, differentiable; padding columns hold -1e9."""
        logits, _ = self.output_layer(self.hidden, weight=self.weight)
        logits = logits.transpose(0, 1).float()
        mask_padded_vocabulary(logits, self.vocab_size)
        return logits


def head_scores(vocab_size: int, gradient_placeholder: bool) -> Any:
    """An `output_processor` of GPTModel.forward that returns HeadScores, or what the model would where its head is no
    plain matrix: logits [1, T, V / tp].
    """
    return partial(_process, vocab_size=vocab_size, gradient_placeholder=gradient_placeholder)


def _process(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    scale_logits: Any,
    config: TransformerConfig,
    vocab_size: int,
    gradient_placeholder: bool,
    **_: Any,
) -> HeadScores | Tensor:
    plain = (
        type(output_layer) is ColumnParallelLinear
        and output_layer.bias is None
        and not output_layer.gather_output
        and output_layer.gtp_remat_size == 1
        and not (config.defer_embedding_wgrad_compute or config.use_mup)
    )
    if not plain:
        logits, _ = output_layer(hidden_states, weight=output_weight)
        return scale_logits(logits).transpose(0, 1).contiguous()
    weight = output_layer.weight if output_weight is None else output_weight
    return HeadScores(hidden_states, output_layer, weight, vocab_size, gradient_placeholder)


@torch.no_grad()
def mask_padded_vocabulary(logits: Tensor, vocab_size: int) -> None:
    """Take the columns that only pad the vocabulary out of every softmax, in place: the engines do not have them.

    logits: [1, T, V / tp]. Their gradient is zero then. The fill is hidden from autograd, which would copy the whole
    gradient for it; the output layer does not need its own output for backward. Finite, because entropies multiply it
    by probability zero.
    """
    first_padded = vocab_size - mpu.get_tensor_model_parallel_rank() * logits.size(-1)
    logits.detach()[..., max(first_padded, 0) :].fill_(_NO_LOGIT)
