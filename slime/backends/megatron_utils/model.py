"""Model, optimizer and the two passes over micro-batches: forward only (log-probs) and one optimizer step.

Nothing here knows what a rollout is; `trainer_core` strings these together.
"""

import contextlib
import io
import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.training import get_megatron_optimizer_config, get_model
from torch import Tensor

from slime.backends.megatron_utils.critic_head import is_critic
from slime.backends.megatron_utils.data import FORWARD_KEYS, TRAIN_KEYS, DataIterator, get_batch
from slime.backends.megatron_utils.indexer_loss import count_real_tokens_only, indexer_metrics, uses_indexers
from slime.backends.megatron_utils.loss import loss_function
from slime.backends.megatron_utils.model_provider import get_model_provider_func, require_something_trains
from slime.backends.megatron_utils.mtp import PredictionLoss
from slime.backends.megatron_utils.output_head import HeadScores, head_scores, mask_padded_vocabulary
from slime.backends.megatron_utils.schedule import Schedule, make_schedule
from slime.backends.megatron_utils.train_metrics import reduce_step_metrics
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """DDP-wrapped model chunks (one a virtual stage) and, unless evaluating only, their optimizer."""

    model: list[torch.nn.Module]
    optimizer: Any | None
    scheduler: Schedule | None


def setup_model_and_optimizer(args: Namespace) -> TrainState:
    """Build the model of this rank and, if `num_rollout` > 0, its optimizer and scheduler. Nothing is loaded yet."""
    with_optimizer = args.train_iters is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = get_model(get_model_provider_func(args), ModelType.encoder_or_decoder, wrap_with_ddp=with_optimizer)
    logger.info("built %d model chunk(s):%s", len(model), printed.getvalue().rstrip())
    if not with_optimizer:
        return TrainState(model, None, None)
    require_something_trains(args, model)
    if args.overlap_param_gather:  # nothing to gather before the first update; the trainer switches the hooks on then
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=False)

    config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(
        config, model, config_overrides=overrides, use_gloo_process_groups=args.use_gloo_process_groups
    )
    scheduler = make_schedule(args, optimizer)
    _connect_schedule(args, model, optimizer)
    return TrainState(model, optimizer, scheduler)


def _connect_schedule(args: Namespace, model: list[torch.nn.Module], optimizer: Any) -> None:
    """Tell Megatron's pipeline schedule how to scale, delay and finish gradients, as its own training loop does."""
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads

    def one_or_all(functions: list[Callable[..., Any]]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    if args.overlap_grad_reduce:
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in model])
        if args.align_grad_reduce:
            config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in model])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in model])


def forward_only(
    function: Callable[..., tuple[Tensor, dict[str, list[Tensor]]]],
    args: Namespace,
    model: list[torch.nn.Module],
    iterators: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """Run all micro-batches of a rollout once without gradients and collect per-sample results.

    `function(scores, args=, unconcat_tokens=, total_lengths=, response_lengths=, with_entropy=, ...)` returns an
    ignored tensor and a dict of per-sample lists. Returns that dict over all samples, in sample order, keys prefixed
    with `store_prefix`; empty except on the last pipeline stage.
    """
    if args.custom_megatron_before_log_prob_hook_path:
        load_function(args.custom_megatron_before_log_prob_hook_path)(args, model, store_prefix)

    def forward_step(iterator: DataIterator, chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = get_batch(iterator, FORWARD_KEYS, args.data_pad_size_multiplier)
        collect = partial(
            function,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=args.use_rollout_entropy,
            top_p_token_ids=batch["rollout_top_p_token_ids"],
            top_p_token_offsets=batch["rollout_top_p_token_offsets"],
        )
        return _forward(args, chunk, batch), collect

    results = _run_schedule(args, model, iterators, sum(num_microbatches), forward_step, training=False)
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    order = [index for indices in iterators[0].micro_batch_indices for index in indices]
    collected: dict[str, list[Tensor]] = {}
    for key in results[0][1]:
        values = [value for _, result in results for value in result[key]]
        column: list[Any] = [None] * len(values)
        for index, value in zip(order, values, strict=True):
            column[index] = value
        collected[store_prefix + key] = column
    return collected


def train_one_step(
    args: Namespace,
    state: TrainState,
    iterators: Sequence[DataIterator],
    num_microbatches: int,
    step_global_batch_size: int,
    rollout_id: int,
    step_id: int,
) -> dict[str, float]:
    """Forward, backward and one optimizer update over the next `num_microbatches` micro-batches.

    Returns, on the last pipeline stage, the step's loss metrics reduced over data and context parallel ranks, and on
    every rank grad_norm (before clipping), lr-pg_<i> and update_skipped (1.0 when fp16 overflowed and nothing
    changed).
    """
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    if args.custom_megatron_before_train_step_hook_path:
        hook = load_function(args.custom_megatron_before_train_step_hook_path)
        hook(args, rollout_id, step_id, state.model, state.optimizer, state.scheduler)

    predictions = PredictionLoss(args, iterators[-1], num_microbatches) if args.enable_mtp_training else None

    def forward_step(iterator: DataIterator, chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = get_batch(iterator, TRAIN_KEYS, args.data_pad_size_multiplier)
        if predictions is not None:
            batch["model_kwargs"] |= predictions.arguments(batch)
        if uses_indexers(args):
            count_real_tokens_only(batch)
        batch["step_name"] = f"rollout {rollout_id} step {step_id}"
        return _forward(args, chunk, batch), partial(
            loss_function, args, batch, num_microbatches, step_global_batch_size
        )

    losses = _run_schedule(args, state.model, iterators, num_microbatches, forward_step, training=True)
    updated, grad_norm, _ = state.optimizer.step()
    if updated:
        state.scheduler.step(increment=step_global_batch_size)
    else:
        logger.warning("rollout %d step %d: gradients overflowed, the update was skipped", rollout_id, step_id)

    metrics = {}
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        metrics = reduce_step_metrics(losses, step_global_batch_size, args.calculate_per_token_loss)
        if predictions is not None:
            metrics |= predictions.metrics(state.optimizer)
    if uses_indexers(args):
        metrics |= indexer_metrics(args, num_microbatches)
    metrics["grad_norm"] = float(grad_norm or 0.0)  # None without clipping
    metrics["update_skipped"] = float(not updated)
    for index, group in enumerate(state.optimizer.param_groups):
        metrics[f"lr-pg_{index}"] = float(group["lr"])
    return metrics


def _forward(args: Namespace, chunk: torch.nn.Module, batch: dict[str, Any]) -> Tensor | HeadScores:
    """Next-token scores on the last stage, hidden states before it.

    Scores are HeadScores; logits [1, T, padded vocabulary / tp] of a model that is no GPTModel, or whose head is no
    plain matrix; and a critic's own output.
    """
    model, kwargs = unwrap_model(chunk), {}
    if isinstance(model, GPTModel) and not is_critic(args):
        kwargs["output_processor"] = head_scores(args.vocab_size, args.overlap_grad_reduce)
    output = chunk(
        input_ids=batch["tokens"],
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=batch["packed_seq_params"],
        **batch["model_kwargs"],
        **kwargs,
    )
    if model.post_process and isinstance(output, Tensor):
        mask_padded_vocabulary(output, args.vocab_size)
    return output


def _run_schedule(
    args: Namespace,
    model: list[torch.nn.Module],
    iterators: Sequence[DataIterator],
    num_microbatches: int,
    forward_step: Callable[..., Any],
    training: bool,
) -> list[Any]:
    """Megatron's schedule over the next micro-batches; what the last stage's loss function returned, in order."""
    for chunk in model:
        chunk.train(training)
    with contextlib.nullcontext() if training else torch.no_grad():
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(iterators),
            model=model,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.decoder_seq_length,
            forward_only=not training,
            collect_non_loss_data=not training,
        )
