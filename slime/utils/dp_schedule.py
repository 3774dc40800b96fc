"""Decides which sample is trained in which step, on which data-parallel rank and in which micro-batch.

Pure bookkeeping on lengths and ids; the rollout side calls it with the trainer's parallel sizes, the trainer obeys it.
"""

import heapq
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slime.utils.flops import flops_of_sequences
from slime.utils.seqlen_balancing import balanced_partitions

logger = logging.getLogger(__name__)


class DPSchedule(NamedTuple):
    """Where every sample goes. Unpacks in this order.

    partitions[r]: positions of rank r's samples in the rollout, step after step, micro-batch after micro-batch.
    micro_batch_indices[r]: positions in partitions[r] of each micro-batch, contiguous, over all steps.
    num_microbatches[s]: micro-batches per rank in step s, the same on every rank.
    global_batch_sizes[s]: rollouts in step s.
    """

    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]


def build_dp_schedule(
    args: Namespace,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
) -> DPSchedule:
    """Schedule one rollout's samples over optimizer steps, ranks and micro-batches.

    total_lengths[i]: tokens (prompt and response) of sample i. rollout_indices[i]: the attempt that generated it; a
    step consists of `global_batch_size` attempts with all their samples. Attempts beyond the last full step are left
    out and counted in a warning. train_parallel_config: dp_size (without context parallelism), cp_size, vpp_size,
    microbatch_group_size_per_vp_stage.

    Raises ValueError, naming flags and arithmetic, when a step cannot be divided as the parallel layout needs.
    """
    if len(total_lengths) != len(rollout_indices):
        raise ValueError(f"{len(total_lengths)} total_lengths but {len(rollout_indices)} rollout_indices")
    for position, length in enumerate(total_lengths):
        if length < 1:
            raise ValueError(f"sample {position} has {length} tokens; every training sample needs at least one")

    dp_size = train_parallel_config["dp_size"]
    vpp_size = train_parallel_config["vpp_size"] or 1
    group = train_parallel_config["microbatch_group_size_per_vp_stage"] if vpp_size > 1 else 1
    steps = _group_into_steps(rollout_indices, global_batch_size)
    flops = None
    if args.balance_data or args.balance_by_flops:
        flops = flops_of_sequences(total_lengths, args)

    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(dp_size)]
    num_microbatches = []
    for step, samples in enumerate(steps):
        if len(samples) < dp_size:
            raise ValueError(
                f"step {step}: {len(samples)} samples < dp {dp_size}: raise --rollout-batch-size, "
                f"--n-samples-per-prompt or --global-batch-size (now {global_batch_size}) until every step has at "
                f"least {dp_size} samples"
            )
        if args.use_dynamic_batch_size:
            capacity = args.max_tokens_per_gpu * train_parallel_config["cp_size"]
            bins = _pack_dynamic(args, samples, total_lengths, flops, capacity, dp_size, group, step)
        else:
            bins = _pack_static(args, samples, dp_size, group, step)
        ranks = _distribute(bins, flops if args.balance_data else None, dp_size)
        num_microbatches.append(len(bins) // dp_size)
        for rank, its_bins in enumerate(ranks):
            for b in its_bins:
                start = len(partitions[rank])
                partitions[rank].extend(bins[b])
                micro_batch_indices[rank].append(list(range(start, len(partitions[rank]))))
    return DPSchedule(partitions, micro_batch_indices, num_microbatches, [global_batch_size] * len(steps))


def _group_into_steps(rollout_indices: Sequence[int], global_batch_size: int) -> list[list[int]]:
    """Sample positions of each step: whole attempts, in the order in which they first appear."""
    attempts: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_indices):
        attempts.setdefault(rollout, []).append(position)
    if global_batch_size < 1:
        raise ValueError(f"--global-batch-size {global_batch_size} must be at least 1")
    num_steps = len(attempts) // global_batch_size
    if num_steps < 1:
        raise ValueError(
            f"{len(attempts)} rollouts < --global-batch-size {global_batch_size}: not one optimizer step; raise "
            f"--rollout-batch-size x --n-samples-per-prompt or use --global-batch-size {max(len(attempts), 1)}"
        )
    ordered = list(attempts.values())
    surplus = ordered[num_steps * global_batch_size :]
    if surplus:
        logger.warning(
            "%d of %d rollouts (%d samples) are not trained: --global-batch-size %d leaves a remainder",
            len(surplus),
            len(ordered),
            sum(map(len, surplus)),
            global_batch_size,
        )
    return [
        [position for attempt in ordered[s * global_batch_size : (s + 1) * global_batch_size] for position in attempt]
        for s in range(num_steps)
    ]


def _pack_static(args: Namespace, samples: list[int], dp_size: int, group: int, step: int) -> list[list[int]]:
    """Consecutive chunks of --micro-batch-size; their number must already suit the layout."""
    size = args.micro_batch_size
    bins = [samples[i : i + size] for i in range(0, len(samples), size)]
    unit = dp_size * group
    if len(bins) % unit:
        legal = [m for m in range(1, len(samples) + 1) if -(-len(samples) // m) % unit == 0]
        advice = f"use --micro-batch-size {min(legal, key=lambda m: abs(m - size))}" if legal else "grow the step"
        raise ValueError(
            f"step {step}: {len(samples)} samples / --micro-batch-size {size} = {len(bins)} micro-batches, not a "
            f"multiple of {_unit_in_words(dp_size, group)}: {advice}, make the samples of a step a multiple of "
            f"{size * unit}, or use --use-dynamic-batch-size"
        )
    return bins


def _pack_dynamic(
    args: Namespace,
    samples: list[int],
    lengths: Sequence[int],
    flops: Sequence[float] | None,
    capacity: int,
    dp_size: int,
    group: int,
    step: int,
) -> list[list[int]]:
    """Bins of at most `capacity` tokens, or of one longer sample; their number a multiple of dp_size x group."""
    unit = dp_size * group
    if len(samples) < unit:
        raise ValueError(
            f"step {step}: {len(samples)} samples cannot fill {_unit_in_words(dp_size, group)} micro-batches: raise "
            f"--global-batch-size until every step has at least {unit} samples"
        )
    bins = _first_fit(samples, lengths, capacity)
    if args.balance_by_flops:
        bins = _pack_by_flops(samples, lengths, flops, capacity, unit, len(bins)) or bins
    wanted = _round_up(len(bins), unit)
    if wanted > len(samples):
        raise ValueError(
            f"step {step}: {len(bins)} micro-batches must grow to {wanted}, a multiple of "
            f"{_unit_in_words(dp_size, group)}, but the step has only {len(samples)} samples: raise "
            f"--max-tokens-per-gpu (now {args.max_tokens_per_gpu}) or make a step a multiple of {unit} samples"
        )
    _split_until(bins, lengths, wanted)
    return bins


def _first_fit(samples: list[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Each sample, in order, into the first bin with room; one that exceeds `capacity` gets a bin of its own.

    A max-tree over the bins' free room finds the first bin with room in O(log n): node i has children 2i and 2i + 1.
    Bins that hold nothing yet are leaves with all their room, so "open a new bin" needs no case of its own.
    """
    leaves = 1 << (len(samples) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for sample in samples:
        length = lengths[sample]
        if length > capacity:
            node = leaves + len(bins)
            left = 0
        else:
            node = 1
            while node < leaves:
                node *= 2
                if room[node] < length:
                    node += 1
            left = room[node] - length
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(sample)
        room[node] = left
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return bins


def _pack_by_flops(
    samples: list[int], lengths: Sequence[int], flops: Sequence[float], capacity: int, unit: int, first_fit_bins: int
) -> list[list[int]] | None:
    """Bins of nearly equal FLOPs that also respect `capacity`; None when the number first-fit needs is not enough.

    Equal FLOPs are not equal tokens, so the smallest number of bins often overflows; it grows in multiples of `unit`
    (the schedule rounds up to these anyway), a few times at most and never beyond what first-fit would end with:
    balance must not cost micro-batches.
    """
    fewest = _round_up(-(-sum(lengths[s] for s in samples) // capacity), unit)
    most = _round_up(first_fit_bins, unit)
    extra = (most - fewest) // unit
    for count in sorted({fewest, *(fewest + extra * n // 4 * unit for n in range(1, 5))}):
        if count >= len(samples):
            return [[s] for s in samples]
        parts = balanced_partitions([flops[s] for s in samples], count)
        bins = [[samples[i] for i in part] for part in parts]
        if all(len(b) == 1 or sum(lengths[s] for s in b) <= capacity for b in bins):
            return bins
    return None


def _split_until(bins: list[list[int]], lengths: Sequence[int], wanted: int) -> None:
    """Halve the bin with most tokens (ties: the later one) until there are `wanted`; bins of one sample stay whole."""
    heap = [(-sum(lengths[s] for s in b), -i) for i, b in enumerate(bins) if len(b) > 1]
    heapq.heapify(heap)
    while len(bins) < wanted:
        index = -heapq.heappop(heap)[1]
        left, right, left_tokens, right_tokens = set(), set(), 0, 0
        for sample in sorted(bins[index], key=lambda s: -lengths[s]):
            if left_tokens <= right_tokens:
                left.add(sample)
                left_tokens += lengths[sample]
            else:
                right.add(sample)
                right_tokens += lengths[sample]
        samples = bins[index]
        bins[index] = [s for s in samples if s in left]
        bins.append([s for s in samples if s in right])
        if len(left) > 1:
            heapq.heappush(heap, (-left_tokens, -index))
        if len(right) > 1:
            heapq.heappush(heap, (-right_tokens, -(len(bins) - 1)))


def _distribute(bins: list[list[int]], flops: Sequence[float] | None, dp_size: int) -> list[list[int]]:
    """Bin numbers of each rank, equally many: every dp_size-th one, or balanced by FLOPs when these are given."""
    if flops is None:
        return [list(range(rank, len(bins), dp_size)) for rank in range(dp_size)]
    return balanced_partitions([sum(flops[s] for s in b) for b in bins], dp_size, equal_size=True)


def _unit_in_words(dp_size: int, group: int) -> str:
    return f"dp {dp_size} x --microbatch-group-size-per-virtual-pipeline-stage {group} = {dp_size * group}"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
