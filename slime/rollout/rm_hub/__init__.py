"""Rewards: which grader scores a sample, and the check that what it says is a usable reward."""

import asyncio
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from slime.rollout.rm_hub.deepscaler import final_part, get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score, normalize_final_answer, same_answer
from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer, grade_answer_verl, label_text
from slime.rollout.rm_hub.remote import remote_rm
from slime.utils.misc import group_by, load_function
from slime.utils.reward_types import BOXED, NOT_YET
from slime.utils.types import Sample, check_reward_number

__all__ = ["async_rm", "batched_async_rm", "get_deepscaler_rule_based_reward", "remote_rm", "unscored_counts"]

logger = logging.getLogger(__name__)

_unscored: Counter[str] = Counter()
_unscored_lock = threading.Lock()


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample: a finite number, or a dict of which `--reward-key` picks one.

    Grader: the sample's `custom_rm_path`, else --custom-rm-path (both called `await fn(args, sample, **kwargs)`), else
    the type in `metadata["rm_type"]` or --rm-type; a `custom_rm_path` of "" skips --custom-rm-path. `boxed_<type>`
    gives the grader the content of the response's last box in place of the response. Raises NotImplementedError for
    an unknown type, ValueError for a reward that is no finite number (unless --custom-reward-post-process-path reads
    it).
    """
    path = _custom_path(args, sample)
    if path:
        reward = await load_function(path)(args, sample, **kwargs)
    else:
        reward = await _built_in(args, sample)
    return _checked(args, sample, reward)


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list:
    """Rewards of several samples, in their order. Custom functions get the list of their samples at once."""
    rewards: list[Any] = [None] * len(samples)
    by_path = group_by(range(len(samples)), lambda i: _custom_path(args, samples[i]))

    async def score(path: str | None, positions: list[int]) -> None:
        members = [samples[i] for i in positions]
        if path:
            scores = await load_function(path)(args, members, **kwargs)
            if not isinstance(scores, list | tuple) or len(scores) != len(members):
                got = f"{len(scores)} rewards" if isinstance(scores, list | tuple) else type(scores).__name__
                raise ValueError(f"{path} got {len(members)} samples and must return as many rewards, got {got}")
        else:
            scores = await asyncio.gather(*(_built_in(args, member) for member in members))
        for i, reward in zip(positions, scores, strict=True):
            rewards[i] = _checked(args, samples[i], reward)

    await asyncio.gather(*(score(path, positions) for path, positions in by_path.items()))
    return rewards


def unscored_counts() -> dict[str, int]:
    """How many responses this process scored zero because there was nothing to grade, by reason."""
    with _unscored_lock:
        return dict(_unscored)


# ---- built-in graders ----


async def _built_in(args: Any, sample: Sample) -> Any:
    rm_type = ((sample.metadata or {}).get("rm_type") or getattr(args, "rm_type", None) or "").strip()
    boxed = rm_type.startswith(BOXED)
    kind = rm_type.removeprefix(BOXED)
    if kind in NOT_YET:
        raise NotImplementedError(f"{_name(sample)}: rm type {rm_type!r} is not supported yet")
    if kind != "remote_rm" and kind not in _GRADERS:
        known = ", ".join(["remote_rm", *_GRADERS])
        raise NotImplementedError(
            f"{_name(sample)}: rm type {rm_type!r} is unknown; give --rm-type or metadata['rm_type'] one of {known} "
            f"(with {BOXED} in front if wanted), or --custom-rm-path"
        )
    response = sample.response
    if boxed:
        response = extract_boxed_answer(response)
        if response is None:
            _count("no boxed answer")
            response = ""
    if kind == "remote_rm":
        return await remote_rm(args, sample, response=response)
    grader = _OF_BOX.get(kind, _GRADERS[kind]) if boxed else _GRADERS[kind]
    return grader(response, sample)


def _math(response: str, sample: Sample) -> int:
    _count_if_ungradable(response, sample)
    return int(grade_answer_verl(response, sample.label))


def _deepscaler(response: str, sample: Sample) -> int:
    _count_if_ungradable(final_part(response), sample)
    return get_deepscaler_rule_based_reward(response, sample.label)


def _dapo(response: str, sample: Sample) -> dict:
    return compute_score(response, sample.label)


def _math_of_box(answer: str, sample: Sample) -> int:
    return int(grade_answer(answer, sample.label))


def _dapo_of_box(answer: str, sample: Sample) -> dict:
    pred = normalize_final_answer(answer)
    correct = same_answer(pred, sample.label)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def _exact(response: str, sample: Sample) -> int:
    if sample.label is None:
        raise ValueError(f"{_name(sample)}: rm type 'exact' needs a label; pass --label-key")
    return int(response.strip() == str(sample.label).strip())


def _f1(response: str, sample: Sample) -> float:
    if sample.label is None:
        raise ValueError(f"{_name(sample)}: rm type 'f1' needs a label; pass --label-key")
    return f1_score(response, str(sample.label))


def _gpqa(response: str, sample: Sample) -> float:
    return compute_gpqa_reward(response, sample.label, sample.metadata)


def _random(response: str, sample: Sample) -> int:
    """0 or 1; a sample with an index gets the same one for the same response, so that runs repeat."""
    draw = random if sample.index is None else random.Random(f"{sample.index} {response}")
    return draw.randint(0, 1)


Grader = Callable[[str, Sample], Any]
_GRADERS: dict[str, Grader] = {
    "deepscaler": _deepscaler,
    "math": _math,
    "dapo": _dapo,
    "f1": _f1,
    "gpqa": _gpqa,
    "exact": _exact,
    "random": _random,
}
# Graders that look for a box or an "Answer:" themselves; these take the box's content.
_OF_BOX: dict[str, Grader] = {"deepscaler": _math_of_box, "math": _math_of_box, "dapo": _dapo_of_box}


# ---- checks and counts ----


def _custom_path(args: Any, sample: Sample) -> str | None:
    if sample.custom_rm_path is not None:
        return sample.custom_rm_path or None
    return getattr(args, "custom_rm_path", None)


def _checked(args: Any, sample: Sample, reward: Any) -> Any:
    """The reward, scalars of numpy or torch as Python numbers. ValueError unless it is usable."""
    if getattr(reward, "ndim", None) == 0:
        reward = reward.item()
    if getattr(args, "custom_reward_post_process_path", None):
        return reward
    if not isinstance(reward, dict):
        check_reward_number(reward, _name(sample))
        return reward
    keys = [key for key in (getattr(args, "reward_key", None), getattr(args, "eval_reward_key", None)) if key]
    present = [key for key in keys if key in reward]
    if keys and not present:
        raise ValueError(
            f"{_name(sample)}: --reward-key {' / '.join(keys)} is not in the reward "
            f"(keys: {', '.join(map(str, reward))})"
        )
    if not keys:
        check_reward_number(reward, _name(sample))
    for key in present:
        check_reward_number(reward[key], _name(sample), key=key, reward=reward)
    return reward


def _count_if_ungradable(response: str, sample: Sample) -> None:
    if not label_text(sample.label):
        _count("no label")
    elif extract_boxed_answer(response) is None:
        _count("no boxed answer")


def _count(reason: str) -> None:
    """Count a zero given for want of something to grade; say so at 1, 10, 100, ..."""
    with _unscored_lock:
        _unscored[reason] += 1
        count = _unscored[reason]
    if str(count).strip("0") == "1":
        logger.warning("%d responses scored zero so far: %s", count, reason)


def _name(sample: Sample) -> str:
    return f"sample index={sample.index} group_index={sample.group_index}"
