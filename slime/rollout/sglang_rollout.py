"""The default rollout function: draw groups of prompts, generate and score them, filter, and stop when the batch is
full.

Groups that were drawn but are not part of the batch go back to the data source.
"""

import asyncio
import copy
import logging
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, flatten_samples
from slime.rollout.data_source import DataSource
from slime.rollout.engine_status import abort_engines, get_model_url
from slime.rollout.eval_rollout import eval_rollout
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.generate_state import Draw, GenerateState
from slime.rollout.generation import generate, generate_and_rm, generate_and_rm_group
from slime.rollout.rm_hub import unscored_counts
from slime.utils.async_utils import cancel_and_wait, run
from slime.utils.http_utils import HttpError
from slime.utils.misc import load_function
from slime.utils.types import Sample

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "get_model_url",
]

logger = logging.getLogger(__name__)

PARTIAL_GRACE_S = (
    30.0  # after the engines are idle, a partial rollout waits this long for rewards and custom code to end
)
MAX_ENGINE_ABORTS = 3  # times a group is started again because an engine, not this rollout, aborted it


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One training rollout of `rollout_batch_size` groups sorted by sample index, or an evaluation of all eval
    datasets.
    """
    if not args.rollout_global_dataset:
        raise ValueError(
            "slime.rollout.sglang_rollout.generate_rollout draws prompts from the global dataset; drop "
            "--disable-rollout-global-dataset or give another --rollout-function-path"
        )
    if evaluation:
        return RolloutFnEvalOutput(run(eval_rollout(args, rollout_id)))
    return run(generate_rollout_async(args, rollout_id, data_source))


async def generate_rollout_async(args: Namespace, rollout_id: int, data_source: DataSource) -> RolloutFnTrainOutput:
    """The training half of generate_rollout, on the event loop."""
    state = GenerateState(args)
    state.reset(rollout_id)
    selection = _Selection(args, state)
    unscored_before = Counter(unscored_counts())
    try:
        while len(selection.kept) < args.rollout_batch_size:
            while state.remaining_batch_size < args.rollout_batch_size:
                _draw(args, state, data_source)
            for task in await state.wait_some(state.pendings, f"rollout {rollout_id} ({selection})"):
                draw = state.pendings.pop(task)
                selection.add(draw, _result(task, draw))
        unused = await abort(args, rollout_id)
    except BaseException:
        await _stop_everything(args, state)
        raise
    for reason, count in (Counter(unscored_counts()) - unscored_before).items():
        selection.metrics[f"rollout/unscored/{reason.replace(' ', '_')}"] = count
    return_unused(args, data_source, unused + selection.surplus, selection.metrics)
    return _output(args, data_source, selection)


@dataclass
class _Selection:
    """The groups of a rollout that have finished: all, those kept, and whole draws that came too late."""

    args: Namespace
    state: GenerateState
    kept: list[list] = field(default_factory=list)
    finished: list[list] = field(default_factory=list)
    surplus: list[Draw] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        path = self.args.dynamic_sampling_filter_path
        self._filter = load_function(path) if path else None

    def __str__(self) -> str:
        return f"{len(self.kept)} of {self.args.rollout_batch_size} groups kept, {len(self.finished)} finished"

    def add(self, draw: Draw, group: list) -> None:
        """Decide about a group that has just finished."""
        args, state, target = self.args, self.state, self.args.rollout_batch_size
        if len(group) != args.n_samples_per_prompt:
            raise ValueError(
                f"a group has {len(group)} members, must be --n-samples-per-prompt {args.n_samples_per_prompt}"
            )
        if any(s.status is Sample.Status.ABORTED and s.reward is None for s in flatten_samples([group])):
            self._start_again(draw, group)
            return
        draw.group = group
        self.finished.append(group)
        if len(self.kept) == target:
            self.surplus.append(draw)
            return
        verdict = call_dynamic_filter(self._filter, args, group)
        if verdict.keep or (verdict.keep_when_insufficient and state.remaining_batch_size <= target):
            self.kept.append(group)
            return
        self.metrics[f"rollout/dynamic_filter/drop_{verdict.reason or 'no_reason'}"] += 1
        state.remaining_batch_size -= 1

    def _start_again(self, draw: Draw, group: list) -> None:
        """An engine gave the group up by itself: generate it anew, from what it has under --partial-rollout."""
        if draw.retries == MAX_ENGINE_ABORTS:
            first = flatten_samples([group])[0]
            raise RuntimeError(
                f"group {first.group_index} came back aborted {draw.retries + 1} times although this rollout was not "
                "stopped: does something else abort requests on the engines, or does the generate function return "
                "ABORTED without a reward?"
            )
        self.metrics["rollout/engine_aborted_groups"] += 1
        group = _resumable(self.args, draw, group, self.state.rollout_id)
        _start(self.args, self.state, Draw(group, draw.untouched, draw.retries + 1))


def _draw(args: Namespace, state: GenerateState, data_source: DataSource) -> None:
    """Take --over-sampling-batch-size groups from the data source and start them."""
    groups = data_source.get_samples(args.over_sampling_batch_size)
    if not groups:
        raise ValueError(
            f"the data source is empty: get_samples({args.over_sampling_batch_size}) returned no group while "
            f"{args.rollout_batch_size - state.remaining_batch_size} of --rollout-batch-size "
            f"{args.rollout_batch_size} are missing"
        )
    for group in groups:
        _start(args, state, Draw(group, copy.deepcopy(group)))
    state.remaining_batch_size += len(groups)


def _start(args: Namespace, state: GenerateState, draw: Draw) -> None:
    task = asyncio.create_task(generate_and_rm_group(args, draw.group, dict(state.sampling_params), evaluation=False))
    state.pendings[task] = draw


def _result(task: asyncio.Task, draw: Draw) -> list:
    try:
        return task.result()
    except Exception as error:
        first = flatten_samples([draw.untouched])[0]
        error.add_note(f"while generating group {first.group_index}, whose first sample has index {first.index}")
        raise


async def abort(args: Namespace, rollout_id: int) -> list[Draw]:
    """Stop the running groups and return their draws.

    Without --partial-rollout their tasks are cancelled at once, whatever they wait for. With it they are told to stop:
    engines return what they have, and what then still runs (rewards, custom code) is cancelled after 30 s; each draw's
    `group` is what can be resumed.
    """
    state = GenerateState(args)
    state.aborted = True
    pendings, state.pendings = state.pendings, {}
    if not pendings:
        return []
    logger.info("rollout %d: stopping %d groups that are not needed", rollout_id, len(pendings))
    try:
        if not args.partial_rollout:
            await cancel_and_wait(pendings)
        await abort_engines(args, lambda: state.in_flight)
        if args.partial_rollout:
            await asyncio.wait(pendings, timeout=PARTIAL_GRACE_S)
    finally:
        await cancel_and_wait(task for task in pendings if not task.done())
    if args.partial_rollout:
        for task, draw in pendings.items():
            group = draw.untouched if task.cancelled() and args.custom_generate_function_path else draw.group
            draw.group = _resumable(args, draw, group if task.cancelled() else _result(task, draw), rollout_id)
    return list(pendings.values())


def _resumable(args: Namespace, draw: Draw, group: list, rollout_id: int | None) -> list:
    """The group in a state from which generation can go on: as drawn, or under --partial-rollout with what it has so
    far.

    A member that was split into several samples can only be kept whole; when one of them is unfinished it starts anew.
    """
    if not args.partial_rollout:
        return copy.deepcopy(draw.untouched)
    members = []
    for member, untouched in zip(group, draw.untouched, strict=True):
        if isinstance(member, list) and any(s.status is Sample.Status.ABORTED for s in flatten_samples([member])):
            member = copy.deepcopy(untouched)
        for sample in flatten_samples([member]):
            if sample.response_length > 0:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
        members.append(member)
    return members


def return_unused(args: Namespace, data_source: DataSource, draws: list[Draw], metrics: Counter[str]) -> None:
    """Give groups back to the data source: what they have with --partial-rollout, else the prompts as they were drawn.

    Counts them as rollout/returned_groups. Without --partial-rollout, a data source that takes nothing back loses the
    prompts, which is counted as rollout/lost_prompts.
    """
    if not draws:
        return
    groups = [draw.group if args.partial_rollout else draw.untouched for draw in draws]
    try:
        data_source.add_samples(groups)
        metrics["rollout/returned_groups"] += len(groups)
    except NotImplementedError as error:
        if args.partial_rollout:
            raise
        metrics["rollout/lost_prompts"] += len(groups)
        logger.warning("%d prompts that were drawn but not used are lost: %s", len(groups), error)


async def _stop_everything(args: Namespace, state: GenerateState) -> None:
    """After a failure: no task may go on, and engines should not work for nothing; the first error is the one to
    report.
    """
    state.aborted = True
    pendings, state.pendings = state.pendings, {}
    await cancel_and_wait(pendings)
    try:
        await asyncio.wait_for(abort_engines(args, lambda: 0), timeout=5.0)
    except (HttpError, TimeoutError) as error:
        logger.warning("could not stop the engines after a failed rollout: %s", error)


def _output(args: Namespace, data_source: DataSource, selection: _Selection) -> RolloutFnTrainOutput:
    kept = sorted(selection.kept, key=_first_index)
    if args.rollout_sample_filter_path:
        load_function(args.rollout_sample_filter_path)(args, kept)
    if args.rollout_all_samples_process_path:
        finished = sorted(selection.finished, key=_first_index)
        load_function(args.rollout_all_samples_process_path)(args, finished, data_source)
    samples = flatten_samples(kept)
    for name, sample in (("first", samples[0]), ("last", samples[-1])):
        logger.info(
            "rollout %s, %s sample: %s | label: %s | reward: %s",
            selection.state.rollout_id,
            name,
            [_shortened(f"{sample.prompt}{sample.response}")],
            str(sample.label)[:100],
            sample.reward,
        )
    selection.state.reset(rollout_id=None)
    return RolloutFnTrainOutput(samples=kept, metrics=dict[str, Any](selection.metrics))


def _shortened(text: str, ends: int = 400) -> str:
    """For the log: beginning and end of a text that is long, and how much lies between."""
    between = len(text) - 2 * ends
    return text if between <= 0 else f"{text[:ends]} ... {between:,} characters ... {text[-ends:]}"


def _first_index(group: list) -> int:
    index = flatten_samples([group])[0].index
    return -1 if index is None else index
