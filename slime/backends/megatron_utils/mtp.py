"""Multi-token prediction: layers after the decoder's last one that guess further ahead, and the loss that trains them.

Layer d (from 0) reads, at position t of a sequence, the hidden state of layer d - 1 there (the decoder's for d = 0)
and the embedding of token t + d + 1, and predicts token t + d + 2. With --mtp-use-repeated-layer all of them are one
layer, which runs --mtp-num-layers times. Embedding, decoder and output head get no gradient from that: the policy
trains as without these layers, whose gradients are clipped on their own (`mtp_detach_heads`).
"""

import contextlib
import copy
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import (
    ParallelState,
    get_logits_and_tokens_offset_with_cp,
    get_parallel_state,
)
from slime.backends.megatron_utils.data import PAD_TOKEN_ID, DataIterator
from slime.backends.megatron_utils.loss.dispatch import NonFiniteLossError
from slime.backends.megatron_utils.loss.vocab_parallel import vocab_parallel_log_probs
from slime.backends.megatron_utils.output_head import HeadScores


@dataclass(frozen=True)
class Depth:
    """What one layer reads and is scored on, for this context-parallel rank's part of a packed micro-batch.

    tokens: int64 [1, T], the token each position reads beside its hidden state; PAD_TOKEN_ID beyond a sequence's end.
    rows: int64 [R], the positions whose prediction is a response token; targets: int64 [R]; mask: float32 [R].
    """

    tokens: Tensor
    rows: Tensor
    targets: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Predictions:
    """A micro-batch's depths. scale: float32 [depths], weight of a token's loss; sums: of unweighted losses so far."""

    depths: list[Depth]
    scale: Tensor
    sums: Tensor
    vocab_size: int


@dataclass(frozen=True)
class Run:
    """Which of `count` runs of a prediction layer over a micro-batch this is, from 0.

    kept: what the layer keeps from one run to the next, the same object in all of them. A run that is recomputed in
    the backward pass has the `Run` of its first time.
    """

    index: int = 0
    count: int = 1
    kept: SimpleNamespace = field(default_factory=SimpleNamespace)

    def of(self, params: PackedSeqParams) -> PackedSeqParams:
        """A copy of a micro-batch's parameters that tells the layer of this run."""
        marked = copy.copy(params)
        marked.prediction_run = self
        return marked


def prediction_run(params: PackedSeqParams) -> Run:
    """The run that `params` tells of; the only one if it tells of none."""
    return getattr(params, "prediction_run", None) or Run()


class PredictionLoss:
    """The loss of all prediction layers over one optimizer step: what every micro-batch adds to it.

    With n_d the number of unmasked response tokens that layer d predicts in the whole step, over all micro-batches
    and ranks, and D layers: loss = mtp_loss_scaling_factor / D * sum_d sum_tokens -log p / n_d. It has no part in the
    loss the trainer reports. Collective over the data-parallel ranks of the last pipeline stage.
    """

    def __init__(self, args: Namespace, iterator: DataIterator, num_microbatches: int) -> None:
        """iterator: of the last virtual stage, at the step's first micro-batch."""
        self._args = args
        self._parallel = get_parallel_state()
        step = iterator.peek(("total_lengths", "response_lengths", "loss_masks"), num_microbatches)
        prompts = [n - r for n, r in zip(step["total_lengths"], step["response_lengths"], strict=True)]

        def scored(depth: int) -> Tensor:
            masks = zip(step["loss_masks"], prompts, strict=True)
            return torch.cat([mask[max(depth + 2 - prompt, 0) :] for mask, prompt in masks]).sum()

        counts = [scored(depth) for depth in range(args.mtp_num_layers)]
        totals = torch.stack([*counts, torch.cat(step["loss_masks"]).sum()]).float()
        if self._parallel.is_last_stage:
            dist.all_reduce(totals, group=mpu.get_data_parallel_group())
        self._counts = totals[:-1].clamp(min=1)
        self._sums = torch.zeros_like(self._counts)
        # Megatron divides gradients by the micro-batches and averages them over DP x CP, or, per token, divides by the
        # step's unmasked tokens, which every context-parallel rank counts.
        if args.calculate_per_token_loss:
            undone = totals[-1] * self._parallel.cp_size
        else:
            undone = num_microbatches * self._parallel.dp_cp_size
        self._scale = args.mtp_loss_scaling_factor / args.mtp_num_layers * undone / self._counts

    def arguments(self, batch: dict[str, Any]) -> dict[str, Predictions]:
        """What `PredictingModel.forward` takes beside the packed micro-batch `batch` (of `get_batch`)."""
        depths = make_depths(
            batch["unconcat_tokens"],
            batch["response_lengths"],
            batch["loss_masks"],
            batch["tokens"].size(1),
            self._args.mtp_num_layers,
            self._parallel,
        )
        return {"predictions": Predictions(depths, self._scale, self._sums, self._args.vocab_size)}

    def metrics(self, optimizer: Any) -> dict[str, float]:
        """mtp_<i>_loss of layer i (from 1), the mean -log p of its tokens, and their mean mtp_loss; mtp_grad_norm.

        The norm, before clipping, is there if gradients are clipped. Collective over the data x context parallel
        ranks of the last pipeline stage.
        """
        dist.all_reduce(self._sums, group=mpu.get_data_parallel_group(with_context_parallel=True))
        losses = (self._sums / self._counts).tolist()
        metrics = {"mtp_loss": sum(losses) / len(losses)}
        metrics |= {f"mtp_{depth}_loss": loss for depth, loss in enumerate(losses, 1)}
        norm = optimizer.grad_norms_by_group.get(MTP_GRAD_NORM_GROUP)
        return metrics if norm is None else metrics | {"mtp_grad_norm": float(norm)}


def make_depths(
    samples: Sequence[Tensor],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    row_length: int,
    count: int,
    parallel: ParallelState,
) -> list[Depth]:
    """The `count` depths of a packed row of `row_length` local tokens (tail included) that holds `samples` in order.

    samples: whole, int64 [total_length]; loss_masks: [response_length]. Nothing crosses the end of a sample.
    """
    lengths, responses = np.array([len(sample) for sample in samples]), np.array(response_lengths)
    position, owner = _positions(lengths.tolist(), row_length, parallel)
    start = (np.cumsum(lengths) - lengths)[owner]
    mask_start = (np.cumsum(responses) - responses)[owner]
    length, prompt = lengths[owner], (lengths - responses)[owner]
    tokens, masks = torch.cat(list(samples)), torch.cat(list(loss_masks)).float()

    def on_device(indices: np.ndarray) -> Tensor:
        return torch.from_numpy(indices).to(tokens.device, non_blocking=True)

    depths = []
    for depth in range(count):
        read, scored = position + depth + 1, position + depth + 2
        inside = read < length
        source = on_device(np.where(inside, start + read, 0))
        shifted = torch.where(on_device(inside), tokens[source], PAD_TOKEN_ID)
        (rows,) = np.nonzero((scored < length) & (scored >= prompt))
        targets = tokens[on_device((start + scored)[rows])]
        mask = masks[on_device((mask_start + scored - prompt)[rows])]
        depths.append(Depth(shifted[None], on_device(rows), targets, mask))
    return depths


def _positions(lengths: list[int], row_length: int, parallel: ParallelState) -> tuple[np.ndarray, np.ndarray]:
    """Of every local token its position in its sample and the sample's number; int64 [row_length] each.

    Padding has positions beyond its sample.
    """
    positions = []
    for n in lengths:
        _, ((a, b), (c, d)), _, _ = get_logits_and_tokens_offset_with_cp(n, 0, parallel)
        positions.append(np.arange(n) if parallel.cp_size == 1 else np.concatenate((np.arange(a, b), np.arange(c, d))))
    owner = np.repeat(np.arange(len(lengths)), [len(part) for part in positions])
    tail = row_length - len(owner)
    positions.append(np.full(tail, lengths[-1]))
    return np.concatenate(positions), np.concatenate((owner, np.full(tail, len(lengths) - 1)))


def require_prediction_layers(args: Namespace, checkpoint: Path) -> None:
    """Raise ValueError when the trainer has prediction layers and the Megatron checkpoint has none.

    checkpoint: the iteration's directory.
    """
    if not args.mtp_num_layers:
        return
    keys = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    if not any(key.startswith("mtp.") for key in keys):
        raise ValueError(
            f"{checkpoint} has no multi-token-prediction layers, and --mtp-num-layers is {args.mtp_num_layers}; "
            f"convert the checkpoint again with --mtp-num-layers {args.mtp_num_layers}, or leave the flag out"
        )


class PredictingModel(GPTModel):
    """A GPTModel whose prediction layers run when they train, and only then; any of its pipeline stages."""

    _predictions: Predictions | None = None

    def forward(self, *args: Any, predictions: Predictions | None = None, **kwargs: Any) -> Tensor:
        """As GPTModel. With `predictions`, backward through the output trains the prediction layers as well."""
        self._predictions = predictions
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._predictions = None

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.mtp_process and self._predictions is not None:
            hidden_states = self._with_prediction_loss(hidden_states, self._predictions, kwargs)
        with _no_prediction_layers(self.config):
            return super()._postprocess(hidden_states, **(kwargs | {"mtp_in_postprocess": False}))

    def _with_prediction_loss(self, hidden_states: Tensor, predictions: Predictions, given: dict[str, Any]) -> Tensor:
        """hidden_states [t, 1, H] of the decoder, unchanged; its backward adds that of the prediction losses."""
        passed = ("attention_mask", "padding_mask", "sequence_len_offset")
        context = {key: given[key] for key in (*passed, "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")}
        shared = self.share_embeddings_and_output_weights
        head = (self.shared_embedding_or_output_weight() if shared else self.output_layer.weight).detach()
        depths, layers, kept = predictions.depths, list(self.mtp.layers), SimpleNamespace()
        repeated = self.config.mtp_use_repeated_layer
        if repeated:
            layers *= len(depths)
        previous = hidden_states.detach()
        for index, (depth, layer) in enumerate(zip(depths, layers, strict=True)):
            run = Run(index, len(depths), kept) if repeated else Run()
            with torch.no_grad():
                read = self.embedding(input_ids=depth.tokens, position_ids=None)
            previous, _, _, _ = layer(
                input_ids=None,  # the layer would shift them itself, token by token over the ranks
                position_ids=None,
                hidden_states=previous,
                embedding=lambda input_ids, position_ids, read=read: read,
                packed_seq_params=run.of(given["packed_seq_params"]),
                **context,
                **(given["extra_block_kwargs"] or {}),
            )
            scores = HeadScores(previous, self.output_layer, head, predictions.vocab_size, gradient_placeholder=False)
            stream, options = scores.projection()
            log_probs, _ = vocab_parallel_log_probs(stream, depth.rows, depth.targets, **options)
            loss = -(log_probs * depth.mask).sum()
            if not torch.isfinite(loss):
                raise NonFiniteLossError(
                    f"the loss of prediction layer {index + 1} (train/mtp_{index + 1}_loss) is {loss}"
                )
            predictions.sums[index] += loss.detach()
            hidden_states = MTPLossAutoScaler.apply(hidden_states, loss * predictions.scale[index])
        return hidden_states


@contextlib.contextmanager
def _no_prediction_layers(config: TransformerConfig) -> Iterator[None]:
    """Megatron's own step after the decoder would take the hidden states for those of all depths in a row."""
    layers, config.mtp_num_layers = config.mtp_num_layers, None
    try:
        yield
    finally:
        config.mtp_num_layers = layers
