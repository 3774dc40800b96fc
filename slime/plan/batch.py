"""From prompts to micro-batches: how many samples a rollout has, and how they spread over steps, ranks and passes.

Bounds, not forecasts: the real numbers depend on the lengths that are generated.
"""

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """The least and the most a number can be, both reachable."""

    least: int
    most: int


@dataclass(frozen=True)
class EvaluationPlan:
    """One evaluation data set. samples_per_prompt: responses to each of its prompts."""

    name: str
    samples_per_prompt: int
    max_response_tokens: int | None


@dataclass(frozen=True)
class BatchPlan:
    """One rollout and its optimizer steps.

    samples = prompts x samples_per_prompt; steps = samples // samples_per_step, untrained is what is left over.
    samples_per_rank: of a step, on average over the data-parallel ranks.
    micro_batches: forward-backward passes of one data-parallel rank in one step. capacity: tokens that are packed into
    one micro-batch over its cp ranks (None without --use-dynamic-batch-size). longest_sample: tokens of prompt and
    response, None when prompts are not capped. longest_on_gpu: tokens a GPU holds of a micro-batch at worst.
    """

    rollouts: int | None
    prompts: int
    samples_per_prompt: int
    samples: int
    prompts_in_flight: int
    steps: int
    samples_per_step: int
    untrained: int
    dp_size: int
    samples_per_rank: float
    micro_batches: Bounds
    micro_batch_unit: int
    capacity: int | None
    longest_sample: int | None
    longest_on_gpu: int | None
    max_tokens_per_rollout: int | None
    evaluations: tuple[EvaluationPlan, ...]


class BatchError(ValueError):
    """The arguments do not make one optimizer step; the message has the arithmetic."""


def plan_batch(a: Namespace, *, dp_size: int, vp_size: int) -> BatchPlan:
    """dp_size: data-parallel ranks, context parallelism not counted. vp_size: virtual stages of a pipeline rank.

    Raises BatchError when a rollout has no optimizer step.
    """
    if not a.rollout_batch_size or not a.global_batch_size:
        raise BatchError("--rollout-batch-size and --global-batch-size (or --num-steps-per-rollout) are needed")
    samples = a.rollout_batch_size * a.n_samples_per_prompt
    per_step = a.global_batch_size
    if samples < per_step:
        terms = f"--rollout-batch-size {a.rollout_batch_size} x --n-samples-per-prompt {a.n_samples_per_prompt}"
        raise BatchError(f"{terms} = {samples} samples are less than one step of --global-batch-size {per_step}")
    longest = _longest_sample(a)
    capacity = a.max_tokens_per_gpu * a.context_parallel_size if a.use_dynamic_batch_size else None
    unit = dp_size * (_group(a) if vp_size > 1 else 1)
    bins = _bins(a, per_step, longest, capacity)
    steps = samples // per_step
    return BatchPlan(
        rollouts=a.num_rollout,
        prompts=a.rollout_batch_size,
        samples_per_prompt=a.n_samples_per_prompt,
        samples=samples,
        prompts_in_flight=max(a.over_sampling_batch_size or 0, a.rollout_batch_size),
        steps=steps,
        samples_per_step=per_step,
        untrained=samples - steps * per_step,
        dp_size=dp_size,
        samples_per_rank=per_step / dp_size,
        micro_batches=Bounds(*(_up(n, unit) // dp_size for n in (bins.least, bins.most))),
        micro_batch_unit=unit,
        capacity=capacity,
        longest_sample=longest,
        longest_on_gpu=_longest_on_gpu(a, longest),
        max_tokens_per_rollout=None if longest is None else longest * samples,
        evaluations=tuple(
            EvaluationPlan(data.name, data.n_samples_per_eval_prompt, data.max_response_len)
            for data in a.eval_datasets
        ),
    )


def _longest_sample(a: Namespace) -> int | None:
    """Prompt and response of the longest possible sample; None when nothing limits it."""
    if a.rollout_max_context_len is not None:
        return a.rollout_max_context_len
    if a.rollout_max_prompt_len is None or a.rollout_max_response_len is None:
        return None
    return a.rollout_max_prompt_len + a.rollout_max_response_len


def _bins(a: Namespace, samples: int, longest: int | None, capacity: int | None) -> Bounds:
    """Micro-batches of a step over all ranks, before they are rounded up to a multiple.

    Static: samples / --micro-batch-size. Dynamic, least: the shortest samples (a token of prompt, one of response);
    most: the longest ones, of which floor(capacity / longest), at least one, fit. First-fit never needs more: a bin
    with fewer of them has room for another.
    """
    if capacity is None:
        count = -(-samples // a.micro_batch_size)
        return Bounds(count, count)
    fitting = 1 if longest is None else max(1, capacity // longest)
    return Bounds(-(-samples // max(1, capacity // 2)), -(-samples // fitting))


def _longest_on_gpu(a: Namespace, longest: int | None) -> int | None:
    """A sample above the capacity travels alone and whole, spread over its cp ranks."""
    cp = a.context_parallel_size
    if a.use_dynamic_batch_size:
        return None if longest is None else max(a.max_tokens_per_gpu, -(-longest // cp))
    return None if longest is None else -(-longest * a.micro_batch_size // cp)


def _group(a: Namespace) -> int:
    return a.microbatch_group_size_per_vp_stage or a.pipeline_model_parallel_size


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
