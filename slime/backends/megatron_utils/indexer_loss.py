"""The loss that trains sparse attention's indexers (--dsa-indexer-loss-coeff): which tokens count, and its metric.

Megatron's layers compute it: KL(attention summed over heads || softmax of index scores), a mean over the query
tokens of a rank's micro-batch; a step averages that over micro-batches and data x context parallel ranks.
"""

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import mpu
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

from slime.backends.megatron_utils.cp_utils import slice_with_cp
from slime.utils.layout.index_sharing import index_sharing


def trains_indexers(args: Namespace) -> bool:
    """Whether the run trains indexers."""
    return args.experimental_attention_variant == "dsa" and bool(args.dsa_indexer_loss_coeff)


def count_real_tokens_only(batch: dict[str, Any]) -> None:
    """Tell the indexers' loss which rows of a packed micro-batch (`get_batch`) are tokens, not padding."""
    parts = [slice_with_cp(torch.ones_like(sample, dtype=torch.bool), False) for sample in batch["unconcat_tokens"]]
    real = torch.cat(parts)
    batch["packed_seq_params"].real_token_mask_q = F.pad(real, (0, batch["tokens"].numel() - real.numel()))


def indexer_metrics(args: Namespace, num_microbatches: int) -> dict[str, float]:
    """{"indexer_kl": mean over indexers, micro-batches and ranks of this step}, in nats, without the coefficient.

    Collective over all ranks of the model, on every one of which it is the same; starts the next step's sum.
    """
    tracker = DSAIndexerLossLoggingHelper.tracker
    total = torch.zeros((), device=torch.cuda.current_device())
    if "values" in tracker:  # absent on a stage without layers
        total += tracker["values"].sum()
    DSAIndexerLossLoggingHelper.clean_loss_in_tracker()
    dist.all_reduce(total, group=mpu.get_pipeline_model_parallel_group())
    ranks = mpu.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(total, group=ranks)
    sharing = index_sharing(args)
    indexers = len(sharing.computing_layers) + ((args.mtp_num_layers or 0) if args.enable_mtp_training else 0)
    runs = num_microbatches * dist.get_world_size(ranks) * indexers
    return {"indexer_kl": float(total) / (args.dsa_indexer_loss_coeff * runs)}
