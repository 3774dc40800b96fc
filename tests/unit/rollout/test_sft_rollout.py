"""SFT samples: the response starts at the first trained token, unusable rows are counted and replaced."""

import pytest

from slime.rollout import sft_rollout
from slime.rollout.base_types import flatten_samples
from slime.rollout.train_data import convert_samples_to_train_data
from slime.utils.types import Sample
from tests.helpers.rollout_args import ListSource, rollout_args


class PrescribedMasks:
    """A mask generator that reads tokens and mask from the conversation itself."""

    def get_loss_mask(self, messages, tools=None):
        tokens = [int(token) for message in messages for token in message["content"].split()]
        mask = [int(message["role"] == "assistant") for message in messages for _ in message["content"].split()]
        return tokens + [99] * len(tools or []), mask + [0] * len(tools or [])


@pytest.fixture(autouse=True)
def prescribed_masks(monkeypatch):
    monkeypatch.setattr(sft_rollout, "_mask_generator", lambda *_: PrescribedMasks())


def conversation(*turns: str) -> list[dict]:
    return [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]


def source_of(*conversations) -> ListSource:
    return ListSource([[Sample(index=i, group_index=i, prompt=c)] for i, c in enumerate(conversations)])


def sft_args(**changes):
    return rollout_args(rollout_batch_size=2, n_samples_per_prompt=1, **changes)


def test_the_response_runs_from_the_first_trained_token_to_the_end():
    source = source_of(conversation("1 2", "3 4", "5", "6"), conversation("1", "2 3"))
    source.groups[1][0].metadata["tools"] = [{}]
    output = sft_rollout.generate_rollout(sft_args(), 0, source)
    first, second = flatten_samples(output.samples)
    assert (first.tokens, first.response_length, first.loss_mask) == ([1, 2, 3, 4, 5, 6], 4, [1, 1, 0, 1])
    assert (second.tokens, second.response_length, second.loss_mask) == ([1, 2, 3, 99], 3, [1, 1, 0])
    assert first.reward == 0 and first.status is Sample.Status.PENDING and output.metrics == {}
    data = convert_samples_to_train_data(sft_args(), [first, second])
    assert data["rewards"] == [0.0, 0.0] and "rollout_log_probs" not in data


def test_rows_that_cannot_be_trained_on_are_counted_and_replaced():
    source = source_of(
        conversation("1 2 3"),
        conversation("1", "2 3 4 5"),
        conversation("1", "2 3"),
        conversation(""),
        conversation("4", "5"),
    )
    output = sft_rollout.generate_rollout(sft_args(rollout_max_context_len=4), 0, source)
    assert [s.index for s in flatten_samples(output.samples)] == [2, 4]
    assert output.metrics == {"rollout/sft/dropped_no_trained_token": 2, "rollout/sft/dropped_too_long": 1}


def test_a_token_with_nothing_before_it_is_not_trained():
    """An assistant turn at position 0 loses its first token; a sample with no other is dropped."""
    source = source_of(
        [{"role": "assistant", "content": "1 2"}], [{"role": "assistant", "content": "1"}], conversation("1", "2")
    )
    output = sft_rollout.generate_rollout(sft_args(), 0, source)
    first, second = flatten_samples(output.samples)
    assert (first.tokens, first.response_length, first.loss_mask) == ([1, 2], 1, [1]) and second.index == 2
    assert output.metrics == {"rollout/sft/dropped_no_trained_token": 1}


class Endless(ListSource):
    def get_samples(self, num_samples):
        return [[Sample(index=0, prompt=conversation("1 2"))] for _ in range(num_samples)]

    def __len__(self):
        return 7


def test_an_epoch_without_a_usable_row_is_an_error():
    with pytest.raises(
        ValueError, match=r"no usable row among \d+ in a row, a whole epoch: dropped \{'no_trained_token'"
    ):
        sft_rollout.generate_rollout(sft_args(), 0, Endless([]))


def test_what_is_no_sft_data_is_refused():
    with pytest.raises(ValueError, match="drop --apply-chat-template"):
        sft_rollout.generate_rollout(sft_args(), 0, source_of("a rendered prompt"))
    with pytest.raises(ValueError, match="--n-samples-per-prompt must be 1"):
        sft_rollout.generate_rollout(sft_args(), 0, ListSource([[Sample(), Sample()]]))
    with pytest.raises(ValueError, match="--eval-function-path"):
        sft_rollout.generate_rollout(sft_args(), 0, source_of(), evaluation=True)
    with pytest.raises(ValueError, match="empty after 0 of --rollout-batch-size 2"):
        sft_rollout.generate_rollout(sft_args(), 0, source_of())
