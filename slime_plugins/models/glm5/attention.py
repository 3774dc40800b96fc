"""Sparse latent attention on Megatron's own: how the tokens are chosen, in what precision, and how long that is kept.

The arithmetic of attention and its kernels are megatron-core's; here is what its defaults leave open.
"""

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerLossAutoScaler,
    DSAttention,
    is_dsa_skip_topk_layer,
)
from torch import Tensor

from slime.backends.megatron_utils.indexer_ties import TIES
from slime.backends.megatron_utils.mtp import prediction_run

# Fused kernels score so many rows at a time that the float32 scores [rows, keys] stay within these bytes.
SCORE_BYTES = 512 * 2**20
MAX_SCORE_ROWS = 8192


class SparseAttention(DSAttention):
    """DSAttention of a packed row, whose choice of tokens is kept as long as a layer needs it.

    Megatron keeps the chosen tokens ([1, tokens, top-k], one tensor a computing layer) on the micro-batch's
    PackedSeqParams until the micro-batch ends. Here they leave it after the last layer that reuses them; where the
    backward pass computes attention again, as soon as no layer can ask for them any more.

    prediction_layer: whether this is multi-token prediction's layer, which chooses for itself alone. Megatron counts
    it as layer 1 and would put its choice where decoder layers that attend again look for that of layer 1.
    chooses_once: whether that layer, run several times over a micro-batch, reuses the choice of its first run.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        prediction_layer: bool = False,
        chooses_once: bool = False,
        **kwargs: Any,
    ):
        super().__init__(config, *args, **kwargs)
        self.prediction_layer, self.chooses_once = prediction_layer, chooses_once
        self.index_share = self.index_share or chooses_once  # read by Megatron
        self.ends_sharing = not is_dsa_skip_topk_layer(
            self.layer_number + 1, self.index_skip_topk_offset, self.index_topk_freq
        )
        self.attends_again = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())
        )
        self.fused_indexer_block_size = MAX_SCORE_ROWS  # read by Megatron

    def forward(
        self, query: Tensor, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any
    ) -> Tensor:
        """As DSAttention's; query [tokens, heads, latent + rotary].

        Raises ValueError without packed sequences: Megatron would keep the chosen tokens on the configuration then,
        where the next batch would find them.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError(
                f"layer {self.layer_number}: sparse attention runs on packed sequences only (PackedSeqParams with "
                "qkv_format thd); a single sequence is a row of one, cu_seqlens [0, tokens]"
            )
        keys = query.size(0) * self.config.context_parallel_size
        self.fused_indexer_block_size = min(MAX_SCORE_ROWS, max(SCORE_BYTES // (4 * keys), 1))
        run = prediction_run(packed_seq_params)
        ran_before = self._HOLDER_ATTR in vars(run.kept)
        if self.chooses_once:
            self.skip_topk = run.index > 0
        real = getattr(packed_seq_params, "real_token_mask_q", None)
        with contextlib.nullcontext() if real is None or not self.training else TIES.of_layer(real):
            output = super().forward(query, *args, packed_seq_params=packed_seq_params, **kwargs)
        if self.prediction_layer:
            again = self.training and self.attends_again
            if run.index == 0 and ran_before if again else run.index == run.count - 1:
                vars(run.kept).clear()
        elif self.index_share:
            self._release_choices(packed_seq_params)
        return output

    def _release_choices(self, params: PackedSeqParams) -> None:
        again = self.training and self.attends_again
        for attribute in (self._HOLDER_ATTR, self._LENGTH_HOLDER_ATTR):
            held = getattr(params, attribute)
            if not again:
                gone = list(held) if self.ends_sharing else []
            elif torch.is_grad_enabled() and not self.skip_topk:
                # computed again, so backward has left all later layers behind, or they choose again in this segment
                gone = [layer for layer in held if layer > self.layer_number]
            else:
                gone = []
            for layer in gone:
                del held[layer]

    def _get_index_share_carrier(self, packed_seq_params: PackedSeqParams, attention_mask: Tensor | None) -> object:
        if not self.prediction_layer:
            return super()._get_index_share_carrier(packed_seq_params, attention_mask)
        return prediction_run(packed_seq_params).kept if self.chooses_once else SimpleNamespace()


class Indexer(DSAIndexer):
    """DSAIndexer that is frozen unless --dsa-indexer-loss-coeff trains it.

    Nothing but that loss gives it gradients, and weight decay alone would shrink it step by step.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if not config.dsa_indexer_loss_coeff:
            self.requires_grad_(False)


def set_indexer_loss_scale(context_parallel_size: int, scale: Tensor) -> None:
    """Give the indexers' loss the scale of a mean over ranks. scale: Megatron's for one micro-batch, float32 [1].

    Megatron multiplies by the context-parallel ranks, as for a loss that is a rank's share of a sum. This one is a
    mean over a rank's tokens, and gradients are averaged over those ranks afterwards.
    """
    DSAIndexerLossAutoScaler.set_loss_scale(scale / context_parallel_size)


@functools.cache
def with_float32_output(linear: type) -> type:
    """A subclass of the linear layer class `linear` (without bias) that returns float32 also for 16-bit weights.

    The indexer's head weights decide between tokens with nearly equal scores: rounded to bfloat16 they choose others
    than the engine, which multiplies bfloat16 into float32 too.
    """

    class Float32Output(linear):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            """x: [..., input_size] -> ([..., output_size] float32, None)."""
            weight = self.weight
            trained = torch.is_grad_enabled() and weight.requires_grad
            if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and not trained:
                out = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32)
                return out.unflatten(0, x.shape[:-1]), None
            return F.linear(x.float(), weight.float()), None

    return Float32Output
