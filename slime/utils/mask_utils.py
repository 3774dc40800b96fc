"""Token ids and loss masks of supervised conversations: which tokens of a chat are trained.

Four ways of rendering, chosen by `--loss-mask-type`; every one trains assistant text only.
"""

from typing import Any

_PROBE = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}
_DISTILL_MARKER = "<｜Assistant｜>"
_ASSISTANT_HEADER, _THINK_OPENING, _TURN_END = "<|im_start|>assistant\n", "<think>\n", "<|im_end|>"

TOKENIZER_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")


class MultiTurnLossMaskGenerator:
    """Turns message lists into (token ids, 0/1 mask) of equal length. 1 = train.

    qwen: each message is rendered alone, without the system prompt that the template adds by itself.
    qwen3: each message is rendered next to a fixed user message, whose tokens are removed, so that reasoning is kept
        or dropped independent of the rest of the conversation.
    qwen3_5: the conversation is rendered once, as the template means it; needs a tokenizer with offsets.
    distill_qwen: the last message is the response, all before it the prompt. `qwen` means this for tokenizers that
        have the DeepSeek assistant marker.

    In the first two, consecutive `tool` messages are rendered together. A message with a `step_loss_mask` other than 1
    is not trained. Those two equal one rendering of the whole conversation for templates that render a message the
    same wherever it stands; templates that strip old reasoning do not.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen"):
        if tokenizer_type not in TOKENIZER_TYPES:
            raise ValueError(f"--loss-mask-type {tokenizer_type!r} is unknown; known: {', '.join(TOKENIZER_TYPES)}")
        self.tokenizer = tokenizer
        if tokenizer_type == "qwen" and _DISTILL_MARKER in tokenizer.get_added_vocab():
            tokenizer_type = "distill_qwen"
        self.tokenizer_type = tokenizer_type
        if tokenizer_type in ("qwen", "qwen3"):
            self.system_message_length, self.gen_token_length = self._measure_template()

    def get_loss_mask(self, messages: list[dict], tools: list | None = None) -> tuple[list[int], list[int]]:
        """Token ids and mask of one conversation. ValueError for an empty one."""
        if not messages:
            raise ValueError("a conversation needs at least one message")
        match self.tokenizer_type:
            case "qwen":
                return self._by_message(messages, tools, self._render_alone)
            case "qwen3":
                return self._by_message(messages, tools, self._render_beside_probe)
            case "qwen3_5":
                return self._whole(messages, tools)
            case "distill_qwen":
                return self._prompt_and_response(messages, tools)

    def get_loss_mask_with_multimodal_alignment(
        self, messages: list[dict], input_ids: list[int], tools: list | None = None
    ) -> tuple[list[int], list[int]]:
        """The processor's `input_ids` and the text's mask, padded with zeros on the left to their length.

        Right where all media stand before the first trained token; the processor expands each to many ids.
        """
        texts = [{**message, "content": _text_of(message.get("content"))} for message in messages]
        text_ids, mask = self.get_loss_mask(texts, tools)
        padding = len(input_ids) - len(text_ids)
        if padding < 0:
            raise ValueError(f"the processor gave {len(input_ids)} ids, the text alone has {len(text_ids)}")
        return input_ids, [0] * padding + mask

    @staticmethod
    def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
        """Tokens from the first trained one to the end, for each mask; 0 where nothing is trained."""
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]

    # ---- qwen, qwen3 ----

    def _by_message(self, messages: list[dict], tools: list | None, render: Any) -> tuple[list[int], list[int]]:
        ids, mask = [], []
        for start, group in _tool_groups(messages):
            piece = render(group, start == 0, tools if start == 0 else None)
            trained = group[0]["role"] == "assistant" and _trains(group[0])
            header = _common_prefix(piece, self._generation_prompt) if trained else len(piece)
            ids += piece
            mask += [0] * header + [1] * (len(piece) - header)
        return ids, mask

    def _render_alone(self, group: list[dict], first: bool, tools: list | None) -> list[int]:
        ids = self._ids(group, tools=tools)
        return ids if first or group[0]["role"] == "system" else ids[self.system_message_length :]

    def _render_beside_probe(self, group: list[dict], first: bool, tools: list | None) -> list[int]:
        if first:
            probe_length = len(self._ids([_PROBE])) - self.system_message_length
            return self._ids([*group, _PROBE], tools=tools)[:-probe_length]
        return self._ids([_PROBE, *group])[len(self._ids([_PROBE])) :]

    def _measure_template(self) -> tuple[int, int]:
        """Lengths of the system prompt the template adds by itself, and of the generation prompt, in tokens."""
        one, two = self._ids([_PROBE]), self._ids([_PROBE, _PROBE])
        prompted = self._ids([_PROBE], add_generation_prompt=True)
        self._generation_prompt = prompted[len(one) :]
        if prompted[: len(one)] != one or not self._generation_prompt:
            raise ValueError("the chat template has no generation prompt, so assistant turns cannot be told apart")
        return 2 * len(one) - len(two), len(self._generation_prompt)

    # ---- qwen3_5 ----

    def _whole(self, messages: list[dict], tools: list | None) -> tuple[list[int], list[int]]:
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError("--loss-mask-type qwen3_5 needs a fast tokenizer (token offsets)")
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        if ids != self._ids(messages, tools=tools):
            raise ValueError("tokenising the rendered conversation differs from the chat template's own tokens")
        trained = bytearray(len(text))  # one flag a character
        assistants = [message for message in messages if message["role"] == "assistant"]
        spans = _assistant_spans(text)
        if len(spans) != len(assistants):
            raise ValueError(
                f"the rendered conversation has {len(spans)} assistant headers {_ASSISTANT_HEADER!r} "
                f"for {len(assistants)} assistant messages"
            )
        for (start, end), message in zip(spans, assistants, strict=True):
            if _trains(message):
                trained[start:end] = b"\x01" * (end - start)
        return ids, [int(any(trained[start:end])) for start, end in encoded["offset_mapping"]]

    # ---- distill_qwen ----

    def _prompt_and_response(self, messages: list[dict], tools: list | None) -> tuple[list[int], list[int]]:
        *prompt, last = messages
        if last["role"] != "assistant" or not prompt:
            raise ValueError("--loss-mask-type distill_qwen needs a prompt followed by one assistant message")
        prompt_ids = self._ids(prompt, tools=tools, add_generation_prompt=True)
        response_ids = list(self.tokenizer(last["content"], add_special_tokens=False)["input_ids"])
        return prompt_ids + response_ids, [0] * len(prompt_ids) + [int(_trains(last))] * len(response_ids)

    def _ids(self, messages: list[dict], **kwargs: Any) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs))


def _trains(message: dict) -> bool:
    return message.get("step_loss_mask", 1) == 1


def _tool_groups(messages: list[dict]) -> list[tuple[int, list[dict]]]:
    """(position, messages) of what is rendered together: single messages, but runs of `tool` messages as one."""
    groups: list[tuple[int, list[dict]]] = []
    for position, message in enumerate(messages):
        if groups and message["role"] == "tool" and messages[position - 1]["role"] == "tool":
            groups[-1][1].append(message)
        else:
            groups.append((position, [message]))
    return groups


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _assistant_spans(text: str) -> list[tuple[int, int]]:
    """Character ranges to train: behind each assistant header (and an opening think tag) to the end of the turn."""
    spans, position = [], text.find(_ASSISTANT_HEADER)
    while position >= 0:
        start = position + len(_ASSISTANT_HEADER)
        if text.startswith(_THINK_OPENING, start):
            start += len(_THINK_OPENING)
        end = text.find(_TURN_END, start)
        end = len(text) if end < 0 else end + len(_TURN_END)
        if text.startswith("\n", end):
            end += 1
        spans.append((start, end))
        position = text.find(_ASSISTANT_HEADER, end)
    return spans


def _text_of(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(item.get("text", "") for item in content if isinstance(item, dict) and item.get("type") == "text")
