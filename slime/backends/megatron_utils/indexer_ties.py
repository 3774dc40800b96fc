"""Equal scores of sparse attention's indexers: which of these tokens are chosen, and how often that is the question.

Scores are equal where relu leaves nothing of any head, and now and then by chance. At the cut, where only some of the
equals can be chosen, Megatron takes whichever torch.topk finds. Here they are those at the lower positions, as in the
engine on the CPU. The engine's GPU kernels have an order of their own, so such queries are counted.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.transformer.experimental_attention_variant import dsa
from torch import Tensor

SORTED_SCORES = 2**24  # at a time; a stable sort takes about 16 bytes for each

_megatrons_topk = dsa.fused_qk_topk_naive


def install(kernels: str) -> None:
    """Let Megatron's choice of tokens go by position among equals: in plain torch, and with `kernels` "tilelang".

    cuDNN's kernels choose by themselves: nothing changes for them, and nothing is counted.
    """
    dsa.fused_qk_topk_naive = _topk_by_position
    if kernels == "tilelang":
        from megatron.core.transformer.experimental_attention_variant.ops import indexer

        if not hasattr(indexer._select_topk_from_logits, "__wrapped__"):
            indexer._select_topk_from_logits = _by_position(indexer._select_topk_from_logits)


@functools.wraps(_megatrons_topk)
def _topk_by_position(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(scores [batch, queries, keys], masked; chosen keys [batch, queries, k], -1 where there are fewer)."""
    scores, chosen = _megatrons_topk(*args, **kwargs)
    with torch.no_grad():
        values = scores.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, -torch.inf)
        TIES.note(prefer_lower_positions(scores, values, chosen))
    return scores, chosen


def _by_position(select: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`select` gives of scores [queries, keys] the best values and their keys [queries, k], in any order."""

    @functools.wraps(select)
    def by_position(scores: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        values, chosen = select(scores, *args, **kwargs)
        with torch.no_grad():
            TIES.note(prefer_lower_positions(scores, values, chosen))
        return values, chosen

    return by_position


def prefer_lower_positions(scores: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
    """Choose again, in place, where equals at the cut were left out: those at the lower positions, best first.

    scores: [..., keys], -inf for what must not be chosen. values and chosen: [..., k], the k highest and their
    positions. Returns which rows had such a tie, bool [...]. Waits for the device once, to see whether there are any.
    """
    k, keys = chosen.size(-1), scores.size(-1)
    if not 0 < k < keys:
        return torch.zeros(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    cut = values.amin(-1, keepdim=True)
    tied = ((scores == cut).sum(-1) > (values == cut).sum(-1)) & (cut[..., 0] > -torch.inf)
    flat = scores.flatten(0, -2)
    for rows in tied.flatten().nonzero()[:, 0].split(max(SORTED_SCORES // keys, 1)):
        # adding 0 makes -0 a 0: a sort by bits would tell them apart
        best, positions = (flat[rows] + 0.0).sort(dim=-1, descending=True, stable=True)
        values.view(-1, k)[rows] = best[:, :k]
        chosen.view(-1, k)[rows] = positions[:, :k].to(chosen.dtype)
    return tied


class TieCount:
    """Of the real query tokens in layers that chose since the last `take`: how many had a tie, how many there were.

    A layer that runs again in the backward pass counts twice in both.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._noted: list[Tensor] | None = None

    @contextlib.contextmanager
    def of_layer(self, real: Tensor) -> Iterator[None]:
        """Count while one layer runs. real: bool [queries], False for padding."""
        self._noted = []
        try:
            yield
            tied = [rows.flatten() for rows in self._noted]
        finally:
            self._noted = None
        if tied:
            counts = torch.stack([(torch.cat(tied) & real).sum(), real.sum()])
            self._counts = counts if self._counts is None else self._counts + counts

    def note(self, tied: Tensor) -> None:
        """The next query rows of the layer that runs; ignored while none is counted."""
        if self._noted is not None:
            self._noted.append(tied)

    def take(self) -> Tensor | None:
        """int64 [tied, all], or None if nothing has been counted."""
        counts, self._counts = self._counts, None
        return counts


TIES = TieCount()


def tie_metrics() -> dict[str, float]:
    """{"indexer_ties": share of query tokens x layers that chose whose choice was among equals} of this step.

    Empty where the kernels do not show their scores. Collective over all ranks of the model, on every one of which it
    is the same.
    """
    counts = TIES.take()
    if counts is None:
        counts = torch.zeros(2, dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(counts, group=mpu.get_pipeline_model_parallel_group())
    dist.all_reduce(counts, group=mpu.get_data_parallel_group(with_context_parallel=True))
    tied, queries = counts.tolist()
    return {"indexer_ties": tied / queries} if queries else {}
