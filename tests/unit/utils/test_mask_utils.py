"""Loss masks of conversations against one rendering of the whole conversation by the chat template."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime.utils.mask_utils import TOKENIZER_TYPES, MultiTurnLossMaskGenerator

# ChatML with a system prompt of its own, tools, and consecutive tool results in one user turn.
CHATML = """{%- if messages[0].role == 'system' -%}{{- '<|im_start|>system\n' + messages[0].content -}}
{%- else -%}{{- '<|im_start|>system\nYou are helpful.' -}}{%- endif -%}
{%- if tools -%}{{- '\nTools: ' + (tools | tojson) -}}{%- endif -%}{{- '<|im_end|>\n' -}}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif m.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + m.role + '\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}{{- '\n<tool_call>\n' + (call | tojson) + '\n</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
# No system prompt of its own; an empty reasoning block in assistant turns behind the last user turn only.
STRIPPING = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last and ns.last >= 0 -%}
{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{{- m.content + '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

TEXT = st.text(alphabet="ab 1+\n", max_size=8)


def build_tokenizer(template: str, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges across newlines and letters, so that boundaries in the wrong place show."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["assistant\n user\n system\n tool ab ba 1+1 \n\n think tool_response"] * 20, trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_tokens([*extra])
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def chatml():
    return build_tokenizer(CHATML)


def whole(tokenizer, messages, tools=None) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)


def trained_text(tokenizer, ids, mask) -> list[str]:
    """The trained runs of tokens as text."""
    runs, previous = [], 0
    for token, trained in zip(ids, mask, strict=True):
        if trained:
            if not previous:
                runs.append([])
            runs[-1].append(token)
        previous = trained
    return [tokenizer.decode(run) for run in runs]


@st.composite
def conversations(draw):
    """Optional system turn, then user / assistant / several tool results in any legal mixture."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(TEXT)})
        for _ in range(draw(st.integers(0, 2))):
            messages.append({"role": "assistant", "content": draw(TEXT), "tool_calls": [{"name": "f"}]})
            messages += [{"role": "tool", "content": draw(TEXT)} for _ in range(draw(st.integers(1, 3)))]
        messages.append({"role": "assistant", "content": draw(TEXT)})
    return messages


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
@given(messages=conversations(), with_tools=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ids_equal_one_rendering_and_only_assistant_text_is_trained(chatml, kind, messages, with_tools):
    tools = [{"name": "f", "parameters": {"x": 1}}] if with_tools else None
    ids, mask = MultiTurnLossMaskGenerator(chatml, kind).get_loss_mask(messages, tools=tools)
    assert ids == whole(chatml, messages, tools)
    runs = trained_text(chatml, ids, mask)
    assistants = [m for m in messages if m["role"] == "assistant"]
    assert len(runs) == len(assistants)
    for run, message in zip(runs, assistants, strict=True):
        call = '\n<tool_call>\n{"name": "f"}\n</tool_call>' if message.get("tool_calls") else ""
        # A newline at the start may share a token with the header's; everything behind it is trained.
        assert run.lstrip("\n") == f"{message['content']}{call}<|im_end|>\n".lstrip("\n")


@pytest.mark.parametrize("kind", ["qwen", "qwen3"])
def test_k14_consecutive_tool_results_are_one_turn(chatml, kind):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "A"}, {"name": "B"}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "b"},
    ]
    ids, _ = MultiTurnLossMaskGenerator(chatml, kind).get_loss_mask(messages)
    assert ids == whole(chatml, messages)
    assert chatml.decode(ids).count("<|im_start|>user") == 2


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_k44_a_user_turn_is_never_trained(chatml, kind):
    messages = [{"role": "user", "content": "ab ab"}, {"role": "assistant", "content": "ba"}]
    ids, mask = MultiTurnLossMaskGenerator(chatml, kind).get_loss_mask(messages)
    assert trained_text(chatml, ids, mask) == ["ba<|im_end|>\n"]


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_step_loss_mask_zeroes_one_message(chatml, kind):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one", "step_loss_mask": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "two", "step_loss_mask": 1},
    ]
    ids, mask = MultiTurnLossMaskGenerator(chatml, kind).get_loss_mask(messages)
    assert trained_text(chatml, ids, mask) == ["two<|im_end|>\n"] and ids == whole(chatml, messages)


def test_measured_lengths(chatml):
    generator = MultiTurnLossMaskGenerator(chatml, "qwen")
    assert generator.gen_token_length == len(chatml.encode("<|im_start|>assistant\n", add_special_tokens=False))
    system = chatml.encode("<|im_start|>system\nYou are helpful.<|im_end|>\n", add_special_tokens=False)
    assert generator.system_message_length == len(system)


def test_qwen3_renders_every_turn_as_if_it_followed_a_question():
    """A template that keeps reasoning behind the last user turn only: qwen3 gives all turns the same treatment."""
    tokenizer = build_tokenizer(STRIPPING)
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids, _ = MultiTurnLossMaskGenerator(tokenizer, "qwen3").get_loss_mask(turn * 2)
    assert ids == whole(tokenizer, turn) * 2 != whole(tokenizer, turn * 2)


def test_qwen3_5_keeps_the_opening_think_tag_out():
    tokenizer = build_tokenizer(STRIPPING)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, "qwen3_5").get_loss_mask(messages)
    assert trained_text(tokenizer, ids, mask) in (["\n</think>\n\nb<|im_end|>\n"], ["\n\n</think>\n\nb<|im_end|>\n"])
    assert ids == whole(tokenizer, messages)


def test_qwen3_5_refuses_a_header_hidden_in_content(chatml):
    messages = [
        {"role": "user", "content": "<|im_start|>assistant\nhi<|im_end|>"},
        {"role": "assistant", "content": "b"},
    ]
    with pytest.raises(ValueError, match="2 assistant headers .* for 1 assistant messages"):
        MultiTurnLossMaskGenerator(chatml, "qwen3_5").get_loss_mask(messages)


def test_qwen3_5_needs_offsets():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="needs a fast tokenizer"):
        MultiTurnLossMaskGenerator(Slow(), "qwen3_5").get_loss_mask([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("kind", ["distill_qwen", "qwen"])
def test_distill_trains_the_last_message_only(kind):
    """The DeepSeek marker among the added tokens turns qwen into distill_qwen."""
    tokenizer = build_tokenizer(CHATML, extra=("<｜Assistant｜>",))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ab ba"}]
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(messages)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=True, return_dict=False, add_generation_prompt=True)
    assert generator.tokenizer_type == "distill_qwen"
    assert ids == prompt + tokenizer.encode("ab ba", add_special_tokens=False)
    assert mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    with pytest.raises(ValueError, match="one assistant message"):
        generator.get_loss_mask(messages[:1])


def test_response_lengths():
    lengths = MultiTurnLossMaskGenerator.get_response_lengths([[0, 0, 1, 0, 1], [0, 0], [], [1]])
    assert lengths == [3, 0, 0, 1]


def test_multimodal_masks_are_padded_on_the_left(chatml):
    generator = MultiTurnLossMaskGenerator(chatml, "qwen")
    content = [{"type": "image", "image": "x"}, {"type": "text", "text": "ab"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "ba"}]
    text_ids, text_mask = generator.get_loss_mask([{"role": "user", "content": "ab"}, messages[1]])
    processor_ids = [7] * 5 + text_ids
    ids, mask = generator.get_loss_mask_with_multimodal_alignment(messages, processor_ids)
    assert ids == processor_ids and mask == [0] * 5 + text_mask
    with pytest.raises(ValueError, match="the processor gave 1 ids"):
        generator.get_loss_mask_with_multimodal_alignment(messages, [7])


def test_unknown_types_and_empty_conversations(chatml):
    with pytest.raises(ValueError, match="'llama' is unknown; known: qwen, qwen3, qwen3_5, distill_qwen"):
        MultiTurnLossMaskGenerator(chatml, "llama")
    for kind in TOKENIZER_TYPES:
        with pytest.raises(ValueError, match="at least one message"):
            MultiTurnLossMaskGenerator(chatml, kind).get_loss_mask([])


def test_a_template_without_generation_prompt_is_refused():
    template = "{%- for m in messages -%}{{- m.role + m.content -}}{%- endfor -%}"
    with pytest.raises(ValueError, match="no generation prompt"):
        MultiTurnLossMaskGenerator(build_tokenizer(template), "qwen")
