"""Evaluation with the default generate path: every eval dataset at once, each with its own sampling, reward and
generate settings.
"""

import asyncio
import copy
import logging
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import flatten_samples
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate_and_rm_group
from slime.utils.async_utils import cancel_and_wait
from slime.utils.data import Dataset
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample, check_reward_number

logger = logging.getLogger(__name__)

_datasets: dict[tuple, Dataset] = {}


async def eval_rollout(args: Namespace, rollout_id: int) -> dict[str, dict[str, Any]]:
    """{dataset name: {"rewards", "truncated", "samples"}}: three lists in the order of the dataset, every prompt's
    samples together.

    Raises ValueError with --group-rm, whose rewards are defined on training groups only.
    """
    if args.group_rm:
        raise ValueError("evaluation cannot score groups as --group-rm does; give an --eval-function-path")
    state = GenerateState(args)
    state.reset(rollout_id)
    tasks: dict[asyncio.Task, str] = {}
    results: dict[str, list[Sample]] = {config.name: [] for config in args.eval_datasets}
    try:
        for config in args.eval_datasets:
            params = eval_sampling_params(args, config)
            for group in eval_groups(args, config):
                tasks[asyncio.create_task(generate_and_rm_group(args, group, params, evaluation=True))] = config.name
        total = len(tasks)
        while tasks:
            what = f"eval {rollout_id} ({total - len(tasks)} of {total} prompts done)"
            for task in await state.wait_some(tasks, what):
                results[tasks.pop(task)] += flatten_samples([task.result()])
    except BaseException:
        state.aborted = True
        await cancel_and_wait(tasks)
        raise
    return {name: _entry(args, name, samples) for name, samples in results.items()}


def eval_groups(args: Namespace, config: EvalDatasetConfig) -> list[list[Sample]]:
    """One group per prompt of the dataset, n_samples_per_eval_prompt samples each; index and group_index count within
    the dataset.
    """
    groups = []
    n = config.n_samples_per_eval_prompt
    for group_index, prompt in enumerate(_dataset(args, config).samples):
        group = [copy.deepcopy(prompt) for _ in range(n)]
        for i, sample in enumerate(group):
            sample.index, sample.group_index = group_index * n + i, group_index
            if config.rm_type is not None:
                sample.metadata["rm_type"] = config.rm_type
            sample.metadata |= copy.deepcopy(config.metadata_overrides or {})
            sample.custom_rm_path = config.custom_rm_path
            sample.generate_function_path = config.custom_generate_function_path
        groups.append(group)
    return groups


def eval_sampling_params(args: Namespace, config: EvalDatasetConfig) -> dict[str, Any]:
    """Sampling parameters of a dataset, in SGLang's names; what the dataset leaves open is left out or follows the
    rollout.
    """

    def or_rollout(value: Any, rollout_value: Any) -> Any:
        return rollout_value if value is None else value

    params = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": or_rollout(config.stop, args.rollout_stop),
        "stop_token_ids": or_rollout(config.stop_token_ids, args.rollout_stop_token_ids),
        "skip_special_tokens": or_rollout(config.skip_special_tokens, args.rollout_skip_special_tokens),
        "no_stop_trim": or_rollout(config.no_stop_trim, True),
        "spaces_between_special_tokens": False,
    }
    for name in ("repetition_penalty", "min_new_tokens"):
        if (value := getattr(config, name)) is not None:
            params[name] = value
    return params


def _dataset(args: Namespace, config: EvalDatasetConfig) -> Dataset:
    """The dataset of `config`, read once per process."""
    options = {
        "input_key": config.input_key,
        "label_key": config.label_key,
        "tool_key": config.tool_key,
        "metadata_key": config.metadata_key,
        "multimodal_keys": config.multimodal_keys,
        "apply_chat_template": config.apply_chat_template,
        "apply_chat_template_kwargs": config.apply_chat_template_kwargs,
        "max_length": args.eval_max_prompt_len,
    }
    key = (config.name, config.path, args.hf_checkpoint, repr(sorted(options.items())))
    if key not in _datasets:
        state = GenerateState(args)
        processor = state.processor if config.multimodal_keys else None
        _datasets[key] = Dataset(
            config.path,
            tokenizer=state.tokenizer,
            processor=processor,
            skip_malformed=args.skip_malformed_rows,
            **options,
        )
        logger.info("eval dataset %s: %d prompts of %s", config.name, len(_datasets[key].samples), config.path)
    return _datasets[key]


def _entry(args: Namespace, name: str, samples: list[Sample]) -> dict[str, Any]:
    samples = sorted(samples, key=lambda sample: sample.index)
    return {
        "rewards": [_reward(args, name, sample) for sample in samples],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }


def _reward(args: Namespace, name: str, sample: Sample) -> float:
    """The sample's reward, or its --eval-reward-key (else --reward-key) entry, as a number."""
    key = args.eval_reward_key or args.reward_key
    reward = sample.reward
    if key and isinstance(reward, dict):
        if key not in reward:
            raise ValueError(
                f"eval dataset {name}, sample {sample.index}: reward has no {key!r} (keys: {', '.join(reward)})"
            )
        reward = reward[key]
    return check_reward_number(reward, f"eval dataset {name}, sample {sample.index}", key=key, reward=sample.reward)
