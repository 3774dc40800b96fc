"""Rules of lengths: a prompt and its response fit into the context, and the context into the model."""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from slime.utils.arguments.checks.common import model_config
from slime.utils.arguments.flag import Problem

CONTEXT, PROMPT, RESPONSE = "--rollout-max-context-len", "--rollout-max-prompt-len", "--rollout-max-response-len"
# Keys of config.json in SGLang's order of preference.
MODEL_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


def check_response_limit(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A response has a limit."""
    generates = a.num_rollout != 0 or any(data.max_response_len is None for data in a.eval_datasets)
    if generates and not a.debug_train_only and a.rollout_max_response_len is None and a.loss_type != "sft_loss":
        says = "is not given; it is the largest number of tokens of a response"
        yield Problem((RESPONSE,), says, f"{RESPONSE} 1024")


def check_context(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The context holds a prompt and at least one token of its response."""
    context, prompt = a.rollout_max_context_len, a.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt > context - 1:
        room = f"at most {context} - 1 = {context - 1}"
        says = f"{prompt} leaves no room for a response in {CONTEXT} {context}: {room}"
        yield Problem((PROMPT,), says, f"{PROMPT} {max(context - 1, 1)}")
    response = a.rollout_max_response_len
    if context is not None and response is not None and response >= context:
        says = f"{response} never fits into {CONTEXT} {context} beside a prompt: at most {context} - 1 = {context - 1}"
        yield Problem((RESPONSE,), says, f"{RESPONSE} {max(context - 1, 1)}")
    if a.eval_min_new_tokens is not None and a.eval_max_response_len is not None:
        if a.eval_min_new_tokens > a.eval_max_response_len:
            says = f"{a.eval_min_new_tokens} is above --eval-max-response-len {a.eval_max_response_len}"
            yield Problem(("--eval-min-new-tokens",), says, f"--eval-min-new-tokens {a.eval_max_response_len}")


def check_model_length(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """What is generated fits into the positions that the engines serve; they refuse longer requests one by one."""
    if a.debug_train_only or a.sglang_allow_auto_truncate:
        return
    limit, source = _engine_length(a)
    if limit is None:
        return
    for flag, tokens, made, legal in _longest_requests(a, given):
        if tokens > limit:
            says = f"{made} does not fit into the engines' context of {limit} tokens ({source})"
            fits = legal - (tokens - limit)
            yield Problem((flag,), says, f"{flag} {fits}" if fits > 0 else "")


def model_length(config: Mapping[str, Any]) -> int | None:
    """Tokens of a sequence that SGLang allows for this config.json; None when it does not say."""
    scaling = config.get("rope_scaling")
    factor = 1.0
    if isinstance(scaling, dict) and scaling:
        own = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
        stated = scaling.get("factor")
        factor = stated if stated and not own and isinstance(stated, int | float) else 1.0
    length = next((config[key] for key in MODEL_LENGTHS if config.get(key) is not None), None)
    return None if length is None or not math.isfinite(factor) else int(factor * length)


def _engine_length(a: Namespace) -> tuple[int | None, str]:
    if a.sglang_context_length is not None:
        return a.sglang_context_length, "--sglang-context-length"
    return model_length(model_config(a)), "config.json"


def _longest_requests(a: Namespace, given: Mapping[str, str]) -> Iterator[tuple[str, int, str, int]]:
    """(flag, tokens of the longest request that it allows, the sum in words, the flag's value).

    Where a context length is set the built-in generate function shortens requests to it; functions of the user's may
    send what they like.
    """
    if a.rollout_max_context_len is not None:
        yield CONTEXT, a.rollout_max_context_len, str(a.rollout_max_context_len), a.rollout_max_context_len
    if a.custom_generate_function_path or "rollout_function_path" in given or a.loss_type == "sft_loss":
        return
    response = a.rollout_max_response_len
    if a.rollout_max_context_len is None and response is not None and a.num_rollout != 0:
        yield RESPONSE, *_sum(response, a.rollout_max_prompt_len, RESPONSE, PROMPT), response
    if a.eval_max_context_len is None and a.eval_interval is not None:
        for data in a.eval_datasets:
            length = data.max_response_len
            if length is not None and length != response and not data.custom_generate_function_path:
                flag = "--eval-config" if a.eval_config else "--eval-max-response-len"
                tokens, made = _sum(length, a.eval_max_prompt_len, "a response of", "--eval-max-prompt-len")
                yield flag, tokens, f"{data.name}: {made}", length


def _sum(response: int, prompt: int | None, name: str, prompt_name: str) -> tuple[int, str]:
    words = f"{prompt_name} {prompt}" if prompt else "a prompt of at least 1"
    return response + (prompt or 1), f"{name} {response} + {words} = {response + (prompt or 1)}"


CHECKS = (check_response_limit, check_context, check_model_length)
