"""From a prompt to a scored sample: the built-in generate request, or a custom function, then hooks and reward."""

import json
import logging
import time
import uuid
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import flatten_samples
from slime.rollout.engine_status import get_model_url
from slime.rollout.generate_state import GenerateState
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import accepts_keyword, apply_sample_hooks
from slime.utils.async_utils import gather_or_cancel
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
RESUMABLE = (Sample.Status.PENDING, Sample.Status.ABORTED)


async def generate_and_rm_group(
    args: Namespace, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list:
    """Generate and score the samples of one prompt; the members of the result are lists where a generate function
    split its sample.

    With the built-in generate, members that ask for the same thing travel in one request. With --group-rm the group is
    scored in one call once all members are there. An aborted group comes back unscored.
    """
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in flatten_samples([group]):
        sample.session_id = sample.session_id or uuid.uuid4().hex
    if any(_generate_path(args, sample) for sample in flatten_samples([group])):
        coros = (generate_and_rm(args, s, _own_params(state, s, sampling_params), evaluation) for s in group)
        group = await gather_or_cancel(*coros)
    else:
        group = await _generate_builtin(args, state, group, sampling_params, evaluation)
    if args.group_rm and not state.aborted:
        samples = flatten_samples([group])
        if any(sample.reward is None for sample in samples) and not _any_aborted(samples):
            rewards = await batched_async_rm(args, samples)
            _set_rewards(samples, rewards)
    return group


async def generate_and_rm(
    args: Namespace, sample: Sample | list, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate and score one sample with its generate function; a sample that is finished already is only scored, if
    need be.

    sampling_params: the sample's own, may be changed by the generate function.
    """
    for leaf in flatten_samples([sample]):
        _mask_offpolicy(args, leaf)
    if isinstance(sample, list):  # an execution that was split, and finished, in an earlier rollout
        return await _score(args, sample)
    state = GenerateState(args)
    if sample.status in FINISHED:
        return await _score(args, sample)
    async with state.hold(1):
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        path = _generate_path(args, sample)
        fn = load_function(path) if path else generate
        keywords = {"evaluation": evaluation} if accepts_keyword(fn, "evaluation") else {}
        output = await fn(args, sample, sampling_params, **keywords)
    if not isinstance(output, Sample | list) or output == []:
        raise TypeError(
            f"generate function {path} must return a Sample or a non-empty list of Sample, got {output!r:.200}"
        )
    return await _finish(args, state, output, evaluation)


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """The built-in generate function: one request that starts or continues the response of `sample`, in place.

    The response may grow to `max_new_tokens` tokens in all and, with the prompt, to --rollout-max-context-len
    (evaluation: --eval-max-context-len); a response that is there already is TRUNCATED without a request. Raises
    ValueError for a finished sample, a prompt that is not text, or ids outside the vocabulary.
    """
    await _request_many(args, GenerateState(args), [(sample, sampling_params)], evaluation)
    return sample


async def _generate_builtin(
    args: Namespace, state: GenerateState, group: list, sampling_params: dict[str, Any], evaluation: bool
) -> list:
    """generate_and_rm for a whole group that uses the built-in generate, with as few requests as possible."""
    unfinished = [sample for sample in group if isinstance(sample, Sample) and sample.status not in FINISHED]
    for sample in flatten_samples([group]):
        _mask_offpolicy(args, sample)
    async with state.hold(len(unfinished)):
        if state.aborted:
            for sample in unfinished:
                sample.status = Sample.Status.ABORTED
            return group
        wanted = [(sample, _own_params(state, sample, sampling_params)) for sample in unfinished]
        await _request_many(args, state, wanted, evaluation)
    started = {id(sample) for sample in unfinished}
    return await gather_or_cancel(
        *(_finish(args, state, s, evaluation) if id(s) in started else _score(args, s) for s in group)
    )


async def _request_many(
    args: Namespace, state: GenerateState, wanted: list[tuple[Sample, dict[str, Any]]], evaluation: bool
) -> None:
    """Generate for several samples, those with equal parameters in one request.

    A router reads one set of sampling parameters per request and sends a request to one engine, so samples with
    different parameters (different room left), and all samples under consistent hashing, go separately. Seeds may
    count up from sample to sample: entry i of a request draws with the request's seed + i (see server_main).
    """
    separate = args.router_policy == "consistent_hashing"
    batches: list[tuple[dict[str, Any], list[Sample]]] = []
    open_batches: dict[str, tuple[dict[str, Any], list[Sample]]] = {}
    prompt_ids: dict[str, list[int]] = {}
    for number, (sample, sampling_params) in enumerate(wanted):
        params = _prepare(args, state, sample, sampling_params, evaluation, prompt_ids)
        if params is None:
            continue
        key = str(number) if separate else json.dumps(params | {"sampling_seed": None}, sort_keys=True)
        batch = open_batches.get(key)
        if batch is None or params.get("sampling_seed") != _seed_of_entry(*batch):
            batch = open_batches[key] = (params, [])
            batches.append(batch)
        batch[1].append(sample)
    await gather_or_cancel(*(_request(args, state, samples, params) for params, samples in batches))


def _seed_of_entry(params: dict[str, Any], samples: list[Sample]) -> int | None:
    """The seed with which a further entry of this request would draw."""
    seed = params.get("sampling_seed")
    return None if seed is None else seed + len(samples)


def _prepare(
    args: Namespace,
    state: GenerateState,
    sample: Sample,
    sampling_params: dict[str, Any],
    evaluation: bool,
    prompt_ids: dict[str, list[int]],
) -> dict[str, Any] | None:
    """Make the sample's tokens ready to send and return its parameters, or None when no room is left for a token.

    prompt_ids: ids of the prompts met so far.
    """
    where = f"sample index={sample.index} group_index={sample.group_index}"
    if sample.status not in RESUMABLE:
        raise ValueError(
            f"{where}: status {sample.status.value} cannot be generated for, only pending and aborted can"
        )
    if sample.multimodal_inputs:
        raise ValueError(
            f"{where}: the built-in generate function sends text only; use --custom-generate-function-path for images"
        )
    if not sample.tokens:
        if not isinstance(sample.prompt, str):
            raise ValueError(f"{where}: the prompt is a message list; pass --apply-chat-template to render it")
        if sample.prompt not in prompt_ids:
            prompt_ids[sample.prompt] = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
        sample.tokens = list(prompt_ids[sample.prompt])
    state.check_vocabulary(sample, sample.tokens)
    room = sampling_params["max_new_tokens"] - sample.response_length
    context = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    if context is not None:
        room = min(room, context - len(sample.tokens))
    if room <= 0:
        sample.status = Sample.Status.TRUNCATED
        return None
    return sampling_params | {"max_new_tokens": room}


async def _request(args: Namespace, state: GenerateState, samples: list[Sample], params: dict[str, Any]) -> None:
    """One /generate call for samples that share their parameters; appends each answer to its sample."""
    single = len(samples) == 1
    input_ids = samples[0].tokens if single else [sample.tokens for sample in samples]
    payload = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}
    consistent = args.router_policy == "consistent_hashing"
    headers = {"X-SMG-Routing-Key": samples[0].session_id} if consistent and samples[0].session_id else None
    url = get_model_url(args)
    state.in_flight += len(samples)
    try:
        answers = await post(url, payload, headers=headers)
    finally:
        state.in_flight -= len(samples)
    state.last_finish = time.monotonic()
    answers = [answers] if single else answers
    if not isinstance(answers, list) or len(answers) != len(samples):
        raise ValueError(f"{url} gave {answers!r:.200} for {len(samples)} prompts, must be as many answers")
    for sample, answer in zip(samples, answers, strict=True):
        _append_answer(args, sample, answer)


def _append_answer(args: Namespace, sample: Sample, answer: dict[str, Any]) -> None:
    meta_info = answer["meta_info"]
    pairs = (
        meta_info.get("output_token_logprobs") or []
    )  # [log-prob, id, text] each; absent when aborted before the first token
    tokens = [pair[1] for pair in pairs]
    output_ids = answer.get("output_ids", tokens)
    if len(output_ids) != len(tokens):
        raise ValueError(
            f"sample index={sample.index}: the engine returned {len(output_ids)} output_ids but {len(tokens)} "
            f"output_token_logprobs"
        )
    log_probs = [pair[0] for pair in pairs]
    sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, meta_info=meta_info, text=answer["text"])


async def _finish(
    args: Namespace, state: GenerateState, output: Sample | list, evaluation: bool
) -> Sample | list[Sample]:
    """Hooks and reward for what a generate function returned."""
    output = await apply_sample_hooks(args, output, rollout_id=state.rollout_id, evaluation=evaluation)
    output = await _score(args, output)
    state.last_finish = time.monotonic()
    return output


async def _score(args: Namespace, output: Sample | list) -> Sample | list[Sample]:
    """Fill in missing rewards unless the group is scored as a whole or something was aborted.

    Siblings split from one execution are scored in one batched call.
    """
    samples = flatten_samples([output])
    if args.group_rm or _any_aborted(samples):
        return output
    unscored = [sample for sample in samples if sample.reward is None]
    if not isinstance(output, list):
        rewards = [await async_rm(args, sample) for sample in unscored]
    else:
        rewards = await batched_async_rm(args, unscored) if unscored else []
    _set_rewards(unscored, rewards)
    return output


def _set_rewards(samples: list[Sample], rewards: Any) -> None:
    rewards = list(rewards)
    if len(rewards) != len(samples):
        raise ValueError(f"the reward function returned {len(rewards)} rewards for {len(samples)} samples")
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


def _mask_offpolicy(args: Namespace, sample: Sample) -> None:
    """--mask-offpolicy-in-partial-rollout: tokens of an earlier rollout, made by older weights, are not trained on."""
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length


def _own_params(state: GenerateState, sample: Sample | list, sampling_params: dict[str, Any]) -> dict[str, Any]:
    return dict(sampling_params) if isinstance(sample, list) else state.params_for(sample, sampling_params)


def _generate_path(args: Namespace, sample: Sample) -> str | None:
    return sample.generate_function_path or args.custom_generate_function_path


def _any_aborted(samples: list[Sample]) -> bool:
    return any(sample.status is Sample.Status.ABORTED for sample in samples)
