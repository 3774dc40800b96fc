"""Log-probability of every response token and entropy of its distribution, and where a packed row holds them.

The arithmetic is `vocab_parallel`'s; here is what belongs to samples: rows, targets, recorded top-p sets.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import (
    ParallelState,
    get_logits_and_tokens_offset_with_cp,
    get_parallel_state,
)
from slime.backends.megatron_utils.loss.vocab_parallel import KeptVocabulary, vocab_parallel_log_probs


class Scores(Protocol):
    """The next-token scores of a packed stream of T positions before they are computed: hidden states and a head."""

    def projection(self) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states [T, H] and the keywords of `vocab_parallel_log_probs` that describe their head."""

    def logits(self) -> Tensor:
        """[1, T, V / tp] float32, differentiable; padding columns hold a very low number."""


def get_log_probs_and_entropy(
    logits: Tensor | Scores,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Tensor] | None = None,
    top_p_token_offsets: Sequence[Tensor] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-probabilities (natural log) of the response tokens under softmax(logits / rollout_temperature).

    logits: [1, T, V / tp], this context-parallel rank's packed stream, any float dtype; or the model's output before
    its head (`Scores`), whose logits are then made in chunks. Computed in float32. unconcat_tokens: whole samples,
    int64 [total_length]. Returns an empty tensor, {"log_probs": [...]}; with_entropy adds {"entropy": [...]}: per
    sample [canonical length]. Entropy has a gradient iff args.entropy_coef != 0.

    With args.rollout_top_p != 1 the log-softmax of response token r runs over the vocabulary its engine kept,
    ids[offsets[r]:offsets[r + 1]] and the token itself; a sample whose record is None is not restricted. Entropy
    always covers the whole vocabulary. non_loss_data is what Megatron's schedule passes to forward-only callbacks.
    """
    parallel = get_parallel_state()
    stream, head = (logits.squeeze(0), {}) if isinstance(logits, Tensor) else logits.projection()
    rows, counts, tokens = response_rows(total_lengths, response_lengths, parallel, stream)
    targets = torch.cat(
        [sample[a:b] for sample, ranges in zip(unconcat_tokens, tokens, strict=True) for a, b in ranges]
    )
    keep = None
    if args.rollout_top_p != 1.0:
        records = _top_p_records(top_p_token_ids, top_p_token_offsets, total_lengths, response_lengths)
        width = head["weight"].size(0) if head else stream.size(1)
        keep = _kept_vocabulary(records, tokens, len(targets), width, parallel, stream.device)
    log_probs, entropy = vocab_parallel_log_probs(
        stream,
        rows,
        targets,
        temperature=args.rollout_temperature,
        with_entropy=with_entropy,
        parallel=parallel,
        chunk_size=args.log_probs_chunk_size,
        keep=keep,
        **head,
    )
    result = {"log_probs": list(log_probs.split(counts))}
    if with_entropy:
        result["entropy"] = list((entropy if args.entropy_coef else entropy.detach()).split(counts))
    return stream.new_empty(0), result


def get_values(
    values: Tensor,
    *,
    args: Namespace,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    non_loss_data: bool = True,
    **_: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """A critic's output [1, T, 1] where it scores response tokens: {"values": [...]}, float32 [canonical length]."""
    parallel = get_parallel_state()
    values = values.squeeze(0).squeeze(-1)
    rows, counts, _ = response_rows(total_lengths, response_lengths, parallel, values)
    return values.new_empty(0), {"values": list(values.index_select(0, rows).float().split(counts))}


def response_rows(
    total_lengths: Sequence[int], response_lengths: Sequence[int], parallel: ParallelState, stream: Tensor
) -> tuple[Tensor, list[int], list[tuple[tuple[int, int], ...]]]:
    """Where a packed stream [T, ...] scores response tokens, in canonical order, sample after sample.

    Returns row numbers (int64, on stream's device), the number of rows of each sample and the ranges of the scored
    tokens in each whole sample. Raises ValueError when the stream is too short.
    """
    offset, pieces, counts, token_ranges = 0, [], [], []
    for n, m in zip(total_lengths, response_lengths, strict=True):
        chunk, chunks, logits, tokens = get_logits_and_tokens_offset_with_cp(n, m, parallel)
        for piece, ((start, _), (a, b)) in enumerate(zip(chunks, logits, strict=True)):
            shift = offset + piece * chunk - start
            pieces.append(np.arange(a + shift, b + shift, dtype=np.int64))
        counts.append(sum(b - a for a, b in logits))
        token_ranges.append(tokens)
        offset += n if parallel.cp_size == 1 else 2 * chunk
    if stream.size(0) < offset:
        raise ValueError(f"the model returned {stream.size(0)} positions for {offset} packed tokens")
    return torch.from_numpy(np.concatenate(pieces)).to(stream.device), counts, token_ranges


def _top_p_records(
    ids: Sequence[Tensor] | None,
    offsets: Sequence[Tensor] | None,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> list[tuple[Tensor, Tensor] | None]:
    """Per sample (kept ids, offsets [response_length + 1]) or None."""
    if ids is None or offsets is None:
        raise ValueError(
            "--rollout-top-p below 1 needs rollout_top_p_token_ids and rollout_top_p_token_offsets of every sample: "
            "the engine must return the kept vocabulary, or use --rollout-top-p 1.0"
        )
    records = []
    for sample, (kept, bounds, length) in enumerate(zip(ids, offsets, response_lengths, strict=True)):
        if kept is not None and len(bounds) != length + 1:
            raise ValueError(f"micro-batch sample {sample}: {len(bounds)} top-p offsets for {length} tokens, not +1")
        records.append(None if kept is None else (kept, bounds, total_lengths[sample] - length))
    return records


def _kept_vocabulary(
    records: list[tuple[Tensor, Tensor, int] | None],
    token_ranges: list[tuple[tuple[int, int], ...]],
    count: int,
    width: int,
    parallel: ParallelState,
    device: torch.device,
) -> KeptVocabulary:
    """The columns of this rank's vocabulary shard that the recorded top-p set of each of `count` rows contains."""
    whole = torch.zeros(count, dtype=torch.bool, device=device)
    row, row_of_id, kept_ids = 0, [], []
    for record, ranges in zip(records, token_ranges, strict=True):
        for start, stop in ranges:
            rows = torch.arange(row, row + stop - start, device=device)
            row += stop - start
            if record is None:
                whole[rows] = True
            elif stop > start:
                ids, bounds, prompt = record
                bounds = bounds[start - prompt : stop - prompt + 1].long()
                row_of_id.append(rows.repeat_interleave(bounds.diff().to(device)))
                kept_ids.append(ids[bounds[0] : bounds[-1]].to(device).long())
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    rows, columns = (torch.cat([nothing, *parts]) for parts in (row_of_id, kept_ids))
    columns = columns - parallel.tp_rank * width
    owned = (columns >= 0) & (columns < width)
    return KeptVocabulary(rows[owned], columns[owned], whole)
