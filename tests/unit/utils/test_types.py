"""Sample: appending tokens, serialisation, and the invariants it refuses to break."""

import base64
import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.types import Sample, check_reward_number

PIECES = st.lists(st.tuples(st.lists(st.integers(0, 999), max_size=6), st.booleans(), st.text(max_size=3)), max_size=8)


def append_all(sample: Sample, pieces) -> Sample:
    for tokens, trainable, text in pieces:
        log_probs = [-0.5 - 0.25 * i for i in range(len(tokens))] if trainable else None
        sample.append_response_tokens(tokens=tokens, log_probs=log_probs, trainable=trainable, text=text)
    return sample


@given(prompt=st.lists(st.integers(0, 999), max_size=5), pieces=PIECES)
def test_appending_keeps_every_per_token_field_aligned(prompt, pieces):
    sample = append_all(Sample(tokens=prompt), pieces)
    sample.validate()
    assert sample.tokens == prompt + [t for tokens, _, _ in pieces for t in tokens]
    assert sample.response == "".join(text for _, _, text in pieces)
    expected = [
        (int(trainable), -0.5 - 0.25 * i if trainable else 0.0)
        for tokens, trainable, _ in pieces
        for i in range(len(tokens))
    ]
    assert list(zip(sample.loss_mask or [], sample.rollout_log_probs or [], strict=True)) == expected
    assert sample.effective_response_length == sum(mask for mask, _ in expected)


@given(prompt=st.lists(st.integers(0, 999), max_size=5), pieces=PIECES, extra=st.integers())
def test_dict_round_trip(prompt, pieces, extra):
    sample = append_all(Sample(index=3, tokens=prompt, status=Sample.Status.TRUNCATED, label={"a": [1]}), pieces)
    sample.prefix_cache_info.add({"cached_tokens": 3, "prompt_tokens": 4})
    sample.source = extra  # beyond the declared fields
    data = sample.to_dict()
    assert data["status"] == "truncated" and data["prefix_cache_info"] == {
        "cached_tokens": 3,
        "total_prompt_tokens": 4,
    }
    restored = Sample.from_dict(data)
    assert restored == sample and restored.source == extra and restored.status is Sample.Status.TRUNCATED
    assert data["status"] == "truncated"  # from_dict leaves its input alone


def test_appending_does_not_touch_a_list_shared_with_another_sample():
    prompt = [1, 2]
    first, second = Sample(tokens=prompt), Sample(tokens=prompt)
    first.append_response_tokens(tokens=[3], log_probs=[-1.0])
    assert prompt == [1, 2] and second.tokens == [1, 2]


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor], ids=["tuple", "numpy", "torch"])
def test_any_sequence_of_tokens_is_accepted(convert):
    sample = Sample(tokens=convert([1, 2]))
    sample.append_response_tokens(tokens=convert([3, 4]), log_probs=convert([-1.0, -2.0]))
    assert sample.tokens == [1, 2, 3, 4] and sample.rollout_log_probs == [-1.0, -2.0]
    assert all(type(token) is int for token in sample.tokens)


def test_an_absent_mask_is_filled_with_ones_for_the_existing_response():
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    sample.append_response_tokens(tokens=[4], trainable=False)
    assert sample.loss_mask == [1, 1, 0] and sample.rollout_log_probs == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokens": [5, 6], "log_probs": [-1.0]}, "1 log_probs for 2 tokens"),
        ({"tokens": [5]}, "need log_probs"),
        ({"tokens": [5], "log_probs": [-1.0], "trainable": False}, "take no log_probs"),
        ({"tokens": [5], "log_probs": [-1.0], "meta_info": {"top_p_token_ids": [5]}}, "only one of top-p"),
        ({"tokens": [5], "log_probs": [-1.0], "meta_info": {"finish_reason": {"type": "odd"}}}, "'odd' is unknown"),
        ({"tokens": [5], "log_probs": [-1.0], "meta_info": {"routed_experts": [0]}}, "only be read with args"),
    ],
)
def test_a_refused_append_changes_nothing(kwargs, message):
    sample = Sample(index=7, tokens=[1, 2])
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(**kwargs)
    assert sample == Sample(index=7, tokens=[1, 2])


def test_trainable_tokens_after_an_unlogged_response_are_refused():
    sample = Sample(index=7, tokens=[1, 2], response_length=1)
    with pytest.raises(ValueError, match="index=7.*without rollout_log_probs"):
        sample.append_response_tokens(tokens=[3], log_probs=[-1.0])


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", Sample.Status.COMPLETED), ("length", Sample.Status.TRUNCATED), ("abort", Sample.Status.ABORTED)],
)
def test_terminal_info_sets_status_versions_and_counters(reason, status):
    meta = {
        "finish_reason": {"type": reason},
        "weight_version": "4",
        "cached_tokens": 3,
        "prompt_tokens": 12,
        "completion_tokens": 10,
        "spec_num_correct_drafts": 6,
        "spec_num_proposed_drafts": 8,
        "spec_verify_ct": 4,
    }
    sample = Sample(tokens=[1])
    for token in (2, 3):
        sample.append_response_tokens(tokens=[token], log_probs=[-1.0], meta_info=meta)
    assert sample.status is status and sample.weight_versions == ["4", "4"]
    assert sample.spec_info.accept_rate == 0.75 and sample.spec_info.accept_length == 2.5
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.25
    assert sample.prefix_cache_info.total_prompt_tokens == 24


def test_unfinished_chunks_and_inserted_text_do_not_end_a_sample():
    sample = Sample(tokens=[1])
    sample.append_response_tokens(
        tokens=[2], log_probs=[-1.0], meta_info={"finish_reason": None, "weight_version": "1"}
    )
    finished = {"finish_reason": {"type": "stop"}, "weight_version": "1"}
    sample.append_response_tokens(tokens=[3], log_probs=[-1.0], meta_info=finished, update_terminal_info=False)
    assert sample.status is Sample.Status.PENDING and sample.weight_versions == []


def test_counters_without_requests_are_zero():
    sample = Sample()
    assert (sample.spec_info.accept_rate, sample.spec_info.accept_length) == (0.0, 0.0)
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.0


# ---- nucleus replay ----


def base64_int32(values: list[int]) -> str:
    return base64.b64encode(np.array(values, dtype=np.int32).tobytes()).decode()


@pytest.mark.parametrize("encode", [list, base64_int32, lambda v: torch.tensor(v, dtype=torch.int32)])
@pytest.mark.parametrize("infix", ["", "kept_"])
def test_nucleus_ids_are_merged_with_running_offsets(encode, infix):
    args = Namespace(rollout_top_p=0.9)

    def meta(ids, offsets):
        return {f"top_p_{infix}token_ids": encode(ids), f"top_p_{infix}token_offsets": encode(offsets)}

    sample = Sample(tokens=[1])
    sample.append_response_tokens(args, tokens=[5, 6], log_probs=[-1.0, -2.0], meta_info=meta([5, 9, 6], [0, 2, 3]))
    sample.append_response_tokens(args, tokens=[7], trainable=False)
    sample.append_response_tokens(args, tokens=[8], log_probs=[-1.0], meta_info=meta([8, 4], [0, 2]))
    sample.validate()
    ids, offsets = sample.rollout_top_p_token_ids.tolist(), sample.rollout_top_p_token_offsets.tolist()
    assert [ids[a:b] for a, b in zip(offsets, offsets[1:], strict=False)] == [[5, 9], [6], [], [8, 4]]
    assert sample.rollout_top_p_token_ids.dtype == torch.int32


@pytest.mark.parametrize("offsets", [[0, 1], [0, 1, 2, 3], [1, 2, 3], [0, 3, 2], [0, 2, 4]])
def test_bad_nucleus_offsets_are_refused(offsets):
    meta = {"top_p_token_ids": [5, 9, 6], "top_p_token_offsets": offsets}
    with pytest.raises(ValueError, match="offsets"):
        Sample(tokens=[1]).append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0], meta_info=meta)


def test_nucleus_ids_may_not_stop_nor_start_in_the_middle():
    meta = {"top_p_token_ids": [5], "top_p_token_offsets": [0, 1]}
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta)
    with pytest.raises(ValueError, match="without top-p token ids"):
        sample.append_response_tokens(tokens=[6], log_probs=[-1.0])
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0])
    with pytest.raises(ValueError, match="start after 1 response tokens"):
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta)


# ---- routed experts ----

ROUTED = Namespace(num_layers=3, moe_router_topk=2)


def routes(rows: int, first: int) -> np.ndarray:
    return np.arange(first, first + rows * 6, dtype=np.int32)


def test_routed_experts_replace_the_rows_from_their_start():
    sample = Sample(tokens=[1, 2])
    meta = {"routed_experts": base64.b64encode(routes(3, 0).tobytes()).decode()}
    sample.append_response_tokens(ROUTED, tokens=[3, 4], log_probs=[-1.0, -1.0], meta_info=meta)
    assert tuple(sample.rollout_routed_experts.shape) == (3, 3, 2)
    sample.append_response_tokens(ROUTED, tokens=[5], trainable=False)
    with pytest.raises(ValueError, match="3 rows, must be len\\(tokens\\) - 1 = 4"):
        sample.validate()
    meta = {"routed_experts": routes(3, 100), "routed_experts_start_len": 2}
    sample.append_response_tokens(ROUTED, tokens=[6], log_probs=[-1.0], meta_info=meta)
    sample.validate()
    expected = np.concatenate([routes(2, 0), routes(3, 100)]).reshape(5, 3, 2)
    assert np.array_equal(sample.rollout_routed_experts.numpy(), expected)


@pytest.mark.parametrize(("rows", "start"), [(2, 0), (4, 0), (1, 2), (2, 1)])
def test_routed_experts_of_the_wrong_size_or_place_are_refused(rows, start):
    meta = {"routed_experts": routes(rows, 0), "routed_experts_start_len": start}
    with pytest.raises(ValueError, match="routed_experts"):
        Sample(tokens=[1, 2]).append_response_tokens(ROUTED, tokens=[3, 4], log_probs=[-1.0] * 2, meta_info=meta)


# ---- invariants, rewards ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_length": 4}, "0..len\\(tokens\\) = 3"),
        ({"response_length": -1}, "response_length -1"),
        ({"loss_mask": [1]}, "len\\(loss_mask\\) is 1, must be 2"),
        ({"loss_mask": [1, 2]}, "other than 0 and 1"),
        ({"rollout_log_probs": [-1.0]}, "len\\(rollout_log_probs\\) is 1"),
        ({"rollout_log_probs": [-1.0, float("nan")]}, "rollout_log_probs\\[1\\] is nan"),
        ({"teacher_log_probs": torch.zeros(3)}, "len\\(teacher_log_probs\\) is 3"),
        ({"rollout_top_p_token_ids": [1]}, "given together"),
        ({"rollout_top_p_token_ids": [1], "rollout_top_p_token_offsets": [0, 1, 2]}, "offsets must rise"),
        ({"rollout_routed_experts": torch.zeros(3, 1, 1)}, "3 rows"),
        ({"reward": float("nan")}, "reward is nan"),
    ],
)
def test_validate_names_the_sample_and_the_broken_rule(fields, message):
    sample = Sample(**{"index": 11, "group_index": 2, "tokens": [1, 2, 3], "response_length": 2, **fields})
    with pytest.raises(ValueError, match=f"sample index=11 group_index=2: .*{message}"):
        sample.validate()


def test_reward_key_picks_an_entry_or_explains_why_not():
    assert Sample(reward=2).get_reward_value(Namespace(reward_key=None)) == 2
    assert Sample(reward={"score": 3}).get_reward_value(Namespace(reward_key="score")) == 3
    with pytest.raises(ValueError, match="index=4.*--reward-key acc.*keys: score"):
        Sample(index=4, reward={"score": 3}).get_reward_value(Namespace(reward_key="acc"))
    with pytest.raises(ValueError, match="needs a dict reward, got int"):
        Sample(reward=1).get_reward_value(Namespace(reward_key="acc"))


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), torch.tensor(0.5), np.array(2)])
def test_numbers_of_every_kind_are_rewards(value):
    assert check_reward_number(value, "here") == float(value)


@pytest.mark.parametrize(
    "value", ["good", None, float("nan"), float("inf"), [1.0], {"a": 1}, torch.tensor(float("nan"))]
)
def test_what_is_no_finite_number_is_no_reward(value):
    with pytest.raises(ValueError, match="here"):
        check_reward_number(value, "here")


def test_k46_a_text_under_the_reward_key_is_a_clear_error():
    sample = Sample(index=9, reward={"score": "a"})
    with pytest.raises(ValueError, match="index=9.*reward\\['score'\\] must be a finite number, got str 'a'"):
        sample.get_numeric_reward(Namespace(reward_key="score"))


def test_importing_sample_imports_no_heavy_package():
    code = (
        "import sys, slime.utils.types, slime.utils.misc; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
