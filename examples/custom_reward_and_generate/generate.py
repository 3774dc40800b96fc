"""Two turns instead of one, for `--custom-generate-function-path`: a wrong answer may be corrected once.

The model answers; where the answer is wrong it is told so and answers again. Both answers are trained on, the words in
between are not.
"""

from argparse import Namespace
from typing import Any

from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

HINT = "wrong, check your answer"


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Fill in the response of `sample`, in place; the texts of the answers go to `metadata["answers"]`.

    `sampling_params["max_new_tokens"]` holds for each answer. In an evaluation there is one answer only, because the
    hint looks at the label. Raises ValueError for a sample that has a part of a response already.
    """
    if sample.response_length:
        raise ValueError(f"sample {sample.index} is half generated, which this function cannot continue")
    state = GenerateState(args)
    sample.tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    answers = [await _answer(args, state, sample, sampling_params)]
    if sample.status is Sample.Status.COMPLETED and answers[0] != str(sample.label) and not evaluation:
        _append_hint(args, state, sample)
        answers.append(await _answer(args, state, sample, sampling_params))
    sample.metadata["answers"] = answers
    sample.metadata["round_number"] = len(answers)
    return sample


async def _answer(args: Namespace, state: GenerateState, sample: Sample, sampling_params: dict[str, Any]) -> str:
    """One request to the router; appends what comes back and returns its text without special tokens."""
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    reply = await post(get_model_url(args), payload)
    pairs = reply["meta_info"].get("output_token_logprobs") or []  # [log-prob, id, text]; absent if aborted at once
    tokens, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
    sample.append_response_tokens(
        args, tokens=tokens, log_probs=log_probs, meta_info=reply["meta_info"], text=reply["text"]
    )
    return state.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def _append_hint(args: Namespace, state: GenerateState, sample: Sample) -> None:
    """The user's second message and the start of the assistant's, as tokens without loss."""
    message = [{"role": "user", "content": HINT}]
    text = state.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    tokens = state.tokenizer.encode(text, add_special_tokens=False)
    sample.append_response_tokens(args, tokens=tokens, trainable=False, text=text)
