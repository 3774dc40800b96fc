"""The loss that trains sparse attention's indexers (--dsa-indexer-loss-coeff): which tokens count, and its metric.

Megatron's layers compute it: KL(attention summed over heads || softmax of index scores), a mean over the query
tokens of a rank's micro-batch; a step averages that over micro-batches and data x context parallel ranks.
"""

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import mpu
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

from slime.backends.megatron_utils.cp_utils import slice_with_cp
from slime.backends.megatron_utils.indexer_ties import tie_metrics
from slime.utils.layout.index_sharing import index_sharing, shares_prediction_choice
from slime.utils.model_facts.config import language_model, load_config


def uses_indexers(args: Namespace) -> bool:
    """Whether the model has sparse attention, whose indexers choose tokens."""
    return args.experimental_attention_variant == "dsa"


def trains_indexers(args: Namespace) -> bool:
    """Whether the run trains indexers."""
    return uses_indexers(args) and bool(args.dsa_indexer_loss_coeff)


def count_real_tokens_only(batch: dict[str, Any]) -> None:
    """Tell the indexers' loss and `TieCount` which rows of a packed micro-batch (`get_batch`) are no padding."""
    parts = [slice_with_cp(torch.ones_like(sample, dtype=torch.bool), False) for sample in batch["unconcat_tokens"]]
    real = torch.cat(parts)
    batch["packed_seq_params"].real_token_mask_q = F.pad(real, (0, batch["tokens"].numel() - real.numel()))


def indexer_metrics(args: Namespace, num_microbatches: int) -> dict[str, float]:
    """Of this step: `tie_metrics`, and of indexers that train indexer_kl, in nats, without the coefficient.

    That is a mean over what chooses tokens, micro-batches and ranks. Collective over all ranks of the model, on every
    one of which it is the same; starts the next step's sums.
    """
    metrics = tie_metrics()
    if not trains_indexers(args):
        return metrics
    tracker = DSAIndexerLossLoggingHelper.tracker
    total = torch.zeros((), device=torch.cuda.current_device())
    if "values" in tracker:  # absent on a stage without layers
        total += tracker["values"].sum()
    DSAIndexerLossLoggingHelper.clean_loss_in_tracker()
    dist.all_reduce(total, group=mpu.get_pipeline_model_parallel_group())
    ranks = mpu.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(total, group=ranks)
    choices = len(index_sharing(args).computing_layers)
    if args.enable_mtp_training:
        choices += 1 if _shares_prediction_choice(args.hf_checkpoint) else args.mtp_num_layers
    runs = num_microbatches * dist.get_world_size(ranks) * choices
    return metrics | {"indexer_kl": float(total) / (args.dsa_indexer_loss_coeff * runs)}


@functools.cache
def _shares_prediction_choice(hf_checkpoint: str) -> bool:
    return shares_prediction_choice(language_model(*load_config(Path(hf_checkpoint))).fields)
