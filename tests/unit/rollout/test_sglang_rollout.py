"""The default rollout against a fake engine: what is asked, what is kept, and what happens to everything else."""

import asyncio
import threading
import time

import pytest

from slime.rollout import sglang_rollout
from slime.rollout.base_types import flatten_samples
from slime.rollout.engine_status import count_requests
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.generate_state import GenerateState, sampling_seed
from slime.rollout.sglang_rollout import generate_rollout, get_model_url
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError, init_http_client
from slime.utils.types import Sample
from tests.helpers.fake_generation_engine import FakeEngine, Reply
from tests.helpers.rollout_args import CharTokenizer, ListSource, groups_of, rollout_args

PROMPTS = ["ab", "cde", "f", "ghij", "kl", "mno", "pqrs", "t"]
HERE = __name__


def ids(prompt: str) -> list[int]:
    return CharTokenizer().encode(prompt)


def rollout(args, groups, rollout_id=0):
    source = ListSource(groups)
    return generate_rollout(args, rollout_id, source), source


def test_samples_carry_exactly_what_the_engine_said(engine: FakeEngine):
    """Tokens, log-probs, text, status, weight version and cache counters are those of the engine's answer, prompt by
    prompt.
    """
    answers = {tuple(ids(p)): [i + 1, i + 2, i + 3][: 1 + i % 3] for i, p in enumerate(PROMPTS)}
    engine.reply = lambda input_ids, _: Reply(list(answers[tuple(input_ids)]))
    output, source = rollout(rollout_args(engine.url), groups_of(PROMPTS, 3))
    assert [[s.index for s in group] for group in output.samples] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    for sample in flatten_samples(output.samples):
        response = answers[tuple(ids(sample.prompt))]
        assert sample.tokens == ids(sample.prompt) + response
        assert sample.response_length == len(response) == sample.reward
        assert sample.rollout_log_probs == [-0.125 * (t % 7 + 1) for t in response]
        assert sample.loss_mask == [1] * len(response)
        assert sample.response == "".join(f"<{t}>" for t in response)
        assert sample.status is Sample.Status.COMPLETED
        assert sample.weight_versions == ["1"]
        assert sample.prefix_cache_info.total_prompt_tokens == len(ids(sample.prompt))
        sample.validate()
    assert source.returned == [] and output.metrics == {}


def test_a_group_is_one_request_with_one_set_of_parameters(engine: FakeEngine):
    rollout(rollout_args(engine.url, rollout_stop_token_ids=[7]), groups_of(PROMPTS, 3))
    assert len(engine.requests) == 4
    for request in engine.requests:
        assert len(request["input_ids"]) == 3
        assert request["return_logprob"] is True
        params = request["sampling_params"]
        assert params == {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 16, "stop": None, "stop_token_ids": [7],
            "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
        }  # fmt: skip


def test_deterministic_inference_gives_every_sample_its_own_seed(engine: FakeEngine):
    """A group travels in one request, whose entries draw with seeds that count up; a sample's seed depends on the
    sample only.
    """
    args = rollout_args(engine.url, sglang_enable_deterministic_inference=True)
    output, _ = rollout(args, groups_of(PROMPTS, 3))
    assert [len(r["input_ids"]) for r in engine.requests] == [3] * 4
    first_seeds = [r["sampling_params"]["sampling_seed"] for r in engine.requests]
    seeds = {seed + i for seed in first_seeds for i in range(3)}
    assert seeds == {sampling_seed(42, s) for s in flatten_samples(output.samples)} and len(seeds) == 12
    first = [s.tokens for s in flatten_samples(output.samples)]
    again, _ = rollout(args, list(reversed(groups_of(PROMPTS[:4], 3))))
    assert [s.tokens for s in flatten_samples(again.samples)] == first


def test_samples_share_a_request_only_if_it_gives_each_its_seed(engine: FakeEngine):
    """A member is finished and another has less room left: whoever is asked for gets the draw of its own seed."""
    args = rollout_args(
        engine.url, sglang_enable_deterministic_inference=True, rollout_batch_size=1, over_sampling_batch_size=1,
        n_samples_per_prompt=6,
    )  # fmt: skip
    alone = [flatten_samples(rollout(args, groups_of(["abc"], 6))[0].samples)[i].tokens for i in range(6)]
    engine.requests.clear()
    group = groups_of(["abc"], 6)[0]
    group[2].tokens, group[2].response, group[2].response_length = [*ids("abc"), 7], "x", 1
    group[2].rollout_log_probs, group[2].loss_mask, group[2].status = [-1.0], [1], Sample.Status.COMPLETED
    group[2].reward = 0.0
    output = flatten_samples(rollout(args, [group])[0].samples)
    asked = [(r["sampling_params"]["sampling_seed"], r["input_ids"]) for r in engine.requests]
    assert asked == [(sampling_seed(42, group[0]), [ids("abc")] * 2), (sampling_seed(42, group[3]), [ids("abc")] * 3)]
    assert [s.tokens for s in output if s.index != 2] == [t for i, t in enumerate(alone) if i != 2]


def test_consistent_hashing_routes_each_sample_by_its_session(engine: FakeEngine):
    args = rollout_args(engine.url, router_policy="consistent_hashing")
    output, _ = rollout(args, groups_of(PROMPTS, 3))
    keys = {headers["X-SMG-Routing-Key"] for headers in engine.headers}
    assert keys == {s.session_id for s in flatten_samples(output.samples)} and len(keys) == 12


@pytest.mark.parametrize(("already", "limit", "room"), [(10, 24, 14), (3, 4, 1), (4, 4, 0), (6, 4, 0)])
def test_a_resumed_sample_gets_only_the_room_that_is_left(engine: FakeEngine, already, limit, room):
    """With nothing left there is no request, the sample is truncated, and the reward is still computed."""
    engine.reply = lambda *_: Reply([1] * 100)
    sample = Sample(index=0, group_index=0, prompt="ab", status=Sample.Status.ABORTED)
    sample.tokens = ids("ab")
    sample.append_response_tokens(tokens=[2] * already, log_probs=[-1.0] * already)
    args = rollout_args(
        engine.url, n_samples_per_prompt=1, rollout_batch_size=1, over_sampling_batch_size=1,
        rollout_max_response_len=limit, partial_rollout=True,
    )  # fmt: skip
    output, _ = rollout(args, [[sample]])
    (result,) = flatten_samples(output.samples)
    assert [r["sampling_params"]["max_new_tokens"] for r in engine.requests] == ([room] if room else [])
    assert result.status is Sample.Status.TRUNCATED
    assert result.response_length == result.reward == already + room
    assert result.tokens == ids("ab") + [2] * already + [1] * room
    if room:
        assert engine.requests[0]["input_ids"] == ids("ab") + [2] * already


def test_the_context_length_bounds_the_response(engine: FakeEngine):
    engine.reply = lambda *_: Reply([1] * 100)
    output, _ = rollout(rollout_args(engine.url, rollout_max_context_len=6), groups_of(PROMPTS[:4], 3))
    assert {len(s.tokens) for s in flatten_samples(output.samples)} == {6}


def test_ids_outside_the_vocabulary_never_reach_the_engine(engine: FakeEngine):
    groups = groups_of(PROMPTS[:4], 3)
    groups[2][1].tokens = [3, 50, 4]
    with pytest.raises(
        ValueError, match=r"index=7 group_index=2: token 50 at position 1 of 3 .* legal ids are 0 to 49"
    ) as e:
        rollout(rollout_args(engine.url), groups)
    assert any("group 2" in note for note in e.value.__notes__)
    assert not engine.killed


def test_vocabulary_is_the_models_not_the_tokenizers(engine: FakeEngine, tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 77}}')
    assert GenerateState(rollout_args(engine.url, hf_checkpoint=str(tmp_path))).vocab_size == 77


def test_an_empty_data_source_is_an_error(engine: FakeEngine):
    with pytest.raises(
        ValueError, match=r"empty: get_samples\(4\) returned no group while 1 of --rollout-batch-size 4"
    ):
        rollout(
            rollout_args(engine.url, dynamic_sampling_filter_path=f"{HERE}.drop_group_1"), groups_of(PROMPTS[:4], 3)
        )


def test_requests_the_engine_refuses_are_not_repeated(engine: FakeEngine):
    engine.failures = [400] * 10
    with pytest.raises(HttpError, match=r"/generate failed after 1 attempt\(s\): HTTP 400: .*told to fail"):
        rollout(rollout_args(engine.url), groups_of(PROMPTS, 3))


# ---- filters ----


def drop_group_1(args, group, **kwargs):
    return DynamicFilterOutput(keep=group[0].group_index != 1, reason="first")


def drop_odd_groups_unless_short(args, group, **kwargs):
    return DynamicFilterOutput(keep=group[0].group_index % 2 == 0, reason="odd", keep_when_insufficient=True)


def keep_even_groups(args, group):
    return group[0].group_index % 2 == 0


def test_dropped_groups_are_counted_and_replaced(engine: FakeEngine):
    args = rollout_args(engine.url, dynamic_sampling_filter_path=f"{HERE}.drop_group_1")
    output, source = rollout(args, groups_of(PROMPTS, 3))
    assert output.metrics["rollout/dynamic_filter/drop_first"] == 1
    kept = [group[0].group_index for group in output.samples]
    back = sorted(group[0].group_index for group in source.returned)
    assert len(kept) == 4 and 1 not in kept and kept == sorted(kept)
    assert sorted(kept + back) == [0, 2, 3, 4, 5, 6, 7], (
        "every other prompt is either in the batch or back in the source"
    )
    assert output.metrics["rollout/returned_groups"] == 3
    for sample in flatten_samples(source.returned):
        assert sample == Sample(index=sample.index, group_index=sample.group_index, prompt=sample.prompt)


def test_a_bare_bool_filter_and_keep_when_insufficient(engine: FakeEngine):
    args = rollout_args(
        engine.url, dynamic_sampling_filter_path=f"{HERE}.keep_even_groups", over_sampling_batch_size=8
    )
    output, source = rollout(args, groups_of(PROMPTS, 3))
    assert [g[0].group_index for g in output.samples] == [0, 2, 4, 6]
    args.dynamic_sampling_filter_path = f"{HERE}.drop_odd_groups_unless_short"
    args.over_sampling_batch_size = 4
    output, source = rollout(args, groups_of(PROMPTS, 3))
    assert [g[0].group_index for g in output.samples] == [0, 1, 2, 3], (
        "4 kept or running = 4 wanted: nothing may be dropped"
    )
    assert source.returned == []


_seen: dict = {}


def remove_longest(args, groups):
    max(flatten_samples(groups), key=lambda s: s.response_length).remove_sample = True


def remember_all(args, all_groups, data_source):
    _seen["groups"] = [group[0].group_index for group in all_groups]


def test_selection_hooks_see_sorted_groups(engine: FakeEngine):
    args = rollout_args(
        engine.url, rollout_sample_filter_path=f"{HERE}.remove_longest",
        rollout_all_samples_process_path=f"{HERE}.remember_all",
        dynamic_sampling_filter_path=f"{HERE}.drop_group_1",
    )  # fmt: skip
    output, _ = rollout(args, groups_of(PROMPTS, 3))
    assert sum(s.remove_sample for s in flatten_samples(output.samples)) == 1
    assert _seen["groups"] == sorted(_seen["groups"]) and {0, 1, 2, 3} <= set(_seen["groups"])


# ---- surplus, abort, partial rollout ----


async def slow_reward_for_group_3(args, sample, **kwargs):
    if sample.group_index == 3:
        await asyncio.sleep(100)
    return 1.0


@pytest.mark.parametrize("partial", [False, True])
def test_what_is_not_needed_is_stopped_at_once(engine: FakeEngine, monkeypatch, partial):
    """Three groups are wanted, the fourth's reward sleeps 100 s: the rollout returns without waiting for it."""
    monkeypatch.setattr(sglang_rollout, "PARTIAL_GRACE_S", 0.2)
    args = rollout_args(
        engine.url, rollout_batch_size=3, custom_rm_path=f"{HERE}.slow_reward_for_group_3", partial_rollout=partial
    )
    start = time.monotonic()
    output, source = rollout(args, groups_of(PROMPTS[:4], 3))
    assert time.monotonic() - start < 2
    assert [g[0].group_index for g in output.samples] == [0, 1, 2]
    ((a, b, c),) = source.returned
    assert (a.index, b.index, c.index) == (9, 10, 11)
    if partial:  # the finished responses are not thrown away; only their reward is missing
        assert all(s.status is Sample.Status.COMPLETED and s.response_length and s.reward is None for s in (a, b, c))
        args.custom_rm_path = "tests.helpers.rollout_args.reward_is_response_length"
        args.rollout_batch_size = args.over_sampling_batch_size = 1
        engine.requests.clear()
        again, _ = rollout(args, [[a, b, c]], rollout_id=1)
        assert [s.reward for s in flatten_samples(again.samples)] == [s.response_length for s in (a, b, c)]
        assert engine.requests == []
    else:
        assert all(s.tokens == [] and s.status is Sample.Status.PENDING and s.session_id is None for s in (a, b, c))


def slow_for_long_prompt(input_ids, params):
    """Prompt "ghij" takes a minute, the others nothing."""
    slow = input_ids[:4] == ids("ghij")
    return Reply([5] * 12, seconds_per_token=5.0) if slow and len(input_ids) < 6 else Reply([1, 2])


def test_aborted_engine_requests_without_partial_rollout_leave_no_trace(engine: FakeEngine):
    engine.reply = slow_for_long_prompt
    args = rollout_args(engine.url, rollout_batch_size=3)
    output, source = rollout(args, groups_of(PROMPTS[:4], 3))
    assert engine.aborts >= 1 and engine.num_running == 0
    assert [s.tokens for s in flatten_samples(source.returned)] == [[]] * 3
    assert output.metrics == {"rollout/returned_groups": 1}


@pytest.mark.parametrize("mask", [False, True])
def test_partial_rollout_continues_from_the_tokens_it_has(engine: FakeEngine, mask):
    def reply(input_ids, params):
        slow = input_ids == ids("ghij")
        return Reply([5, 6, 7, 8] * 100, seconds_per_token=0.05) if slow else Reply([1, 2])

    engine.reply = reply
    args = rollout_args(
        engine.url, rollout_batch_size=3, rollout_max_response_len=40, partial_rollout=True,
        mask_offpolicy_in_partial_rollout=mask, custom_rm_path=f"{HERE}.reward_after_a_while",
    )  # fmt: skip
    groups = groups_of(PROMPTS[:4], 3)
    groups[3][0].metadata["start_rollout_id"] = 2  # was cut before: the first time counts
    output, source = rollout(args, groups, rollout_id=5)
    (group,) = source.returned
    for sample in group:
        assert sample.status is Sample.Status.ABORTED and sample.reward is None
        assert sample.metadata["start_rollout_id"] == (2 if sample is group[0] else 5)
        assert 0 < sample.response_length < 40
        sample.validate()
    before = [s.response_length for s in group]
    engine.weight_version = "2"
    args.rollout_batch_size = args.over_sampling_batch_size = 1
    again, _ = rollout(args, [group], rollout_id=6)
    for old, sample in zip(before, flatten_samples(again.samples), strict=True):
        assert sample.response_length == old + 2 and sample.tokens[-2:] == [1, 2]
        assert sample.loss_mask == [0 if mask else 1] * old + [1, 1]
        assert sample.weight_versions == ["1", "2"] and sample.reward is not None


async def reward_after_a_while(args, sample, **kwargs):
    await asyncio.sleep(0.3)
    return 1.0


def test_abort_gets_through_when_every_connection_is_busy(engine: FakeEngine, monkeypatch):
    """As many requests as --sglang-server-concurrency allows are waiting; stopping them needs connections too."""
    engine.reply = lambda input_ids, _: Reply([1, 2, 3], seconds_per_token=0 if input_ids == ids("ab") else 60.0)
    args = rollout_args(
        engine.url, sglang_server_concurrency=11, rollout_batch_size=1, over_sampling_batch_size=12,
        n_samples_per_prompt=1, partial_rollout=True,
    )  # fmt: skip
    monkeypatch.setattr(http_utils, "_config", http_utils._ClientConfig())
    init_http_client(args)
    assert http_utils._config.max_connections == 11
    start = time.monotonic()
    output, source = rollout(args, groups_of(["ab"] + ["cd"] * 11, 1))
    assert time.monotonic() - start < 5 and [g[0].index for g in output.samples] == [0] and len(source.returned) == 11


def test_a_group_the_engine_aborts_by_itself_is_generated_again(engine: FakeEngine):
    """Someone else aborts everything once: the rollout is complete all the same, and says how many groups were
    affected.
    """
    calls = []

    def reply(input_ids, params):
        calls.append(input_ids)
        return Reply([4, 4], finish_reason="abort") if len(calls) <= 3 else Reply([1, 2, 3])

    engine.reply = reply
    output, _ = rollout(rollout_args(engine.url), groups_of(PROMPTS[:4], 3))
    assert output.metrics == {"rollout/engine_aborted_groups": 1}
    assert all(s.tokens[-s.response_length :] == [1, 2, 3] for s in flatten_samples(output.samples))
    engine.reply = lambda *_: Reply([4], finish_reason="abort")
    with pytest.raises(RuntimeError, match="came back aborted 4 times"):
        rollout(rollout_args(engine.url), groups_of(PROMPTS[:4], 3))


def test_a_stall_names_the_engine(engine: FakeEngine):
    engine.reply = lambda *_: Reply([1] * 10, seconds_per_token=30.0)
    args = rollout_args(engine.url, rollout_stall_timeout=0.3)
    with pytest.raises(
        TimeoutError, match=rf"no sample finished for .* 12 requests in flight; waiting for {engine.url} \(12 "
    ):
        rollout(args, groups_of(PROMPTS[:4], 3))
    assert engine.num_running == 0 and not GenerateState(args).pendings


class NoBuffer(ListSource):
    def add_samples(self, samples):
        raise NotImplementedError("no buffer")


def test_prompts_a_source_does_not_take_back_are_counted_as_lost(engine: FakeEngine):
    engine.reply = slow_for_long_prompt
    args = rollout_args(engine.url, rollout_batch_size=3)
    output = generate_rollout(args, 0, NoBuffer(groups_of(PROMPTS[:4], 3)))
    assert output.metrics == {"rollout/lost_prompts": 1}


# ---- custom functions ----


async def split_in_two(args, sample, sampling_params):
    """A generate function that turns one execution into two samples."""
    sampling_params["changed"] = True  # its own copy: no one else sees this
    other = Sample(index=sample.index, group_index=sample.group_index, prompt=sample.prompt)
    for number, part in enumerate((sample, other)):
        part.tokens = [1, 2]
        part.append_response_tokens(tokens=[3] * (number + 1), log_probs=[-1.0] * (number + 1))
        part.rollout_id, part.status = sample.index, Sample.Status.COMPLETED
    assert "other" not in sampling_params
    return [sample, other]


async def with_evaluation(args, sample, sampling_params, evaluation):
    assert "changed" not in sampling_params
    sampling_params["changed"] = True
    sample.tokens, sample.response_length, sample.reward = [1, 2], 1, float(evaluation)
    sample.status = Sample.Status.COMPLETED
    return sample


def mark(args, sample, rollout_id, **kwargs):
    sample.metadata["marked"] = (rollout_id, kwargs["evaluation"])


async def replace(args, sample):
    copy = Sample.from_dict(sample.to_dict())
    copy.metadata = dict(sample.metadata, replaced=True)
    return copy


def bad_hook(args, sample):
    return 1


def test_fan_out_is_hooked_scored_and_filtered(engine: FakeEngine):
    args = rollout_args(
        engine.url, custom_generate_function_path=f"{HERE}.split_in_two",
        rollout_sample_hook_path=[f"{HERE}.mark", f"{HERE}.replace"],
        dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    )  # fmt: skip
    output, _ = rollout(args, groups_of(PROMPTS, 3), rollout_id=9)
    assert all(isinstance(member, list) and len(member) == 2 for group in output.samples for member in group)
    samples = flatten_samples(output.samples)
    assert [s.reward for s in samples] == [1.0, 2.0] * 12
    assert all(s.metadata == {"marked": (9, False), "replaced": True} for s in samples)
    assert engine.requests == []


def test_a_hook_that_returns_something_else_is_refused(engine: FakeEngine):
    with pytest.raises(TypeError, match=r"bad_hook must return a Sample or None, got int"):
        rollout(rollout_args(engine.url, rollout_sample_hook_path=[f"{HERE}.bad_hook"]), groups_of(PROMPTS, 3))


def test_evaluation_is_passed_only_to_functions_that_declare_it(engine: FakeEngine):
    args = rollout_args(engine.url, custom_generate_function_path=f"{HERE}.with_evaluation")
    output, _ = rollout(args, groups_of(PROMPTS, 3))
    assert [s.reward for s in flatten_samples(output.samples)] == [0.0] * 12


async def rank_within_group(args, samples, **kwargs):
    assert len(samples) == 3
    return [float(i) for i, _ in enumerate(samples)]


def test_group_rm_scores_the_group_in_one_call(engine: FakeEngine):
    args = rollout_args(engine.url, group_rm=True, custom_rm_path=f"{HERE}.rank_within_group")
    output, _ = rollout(args, groups_of(PROMPTS, 3))
    assert [[s.reward for s in group] for group in output.samples] == [[0.0, 1.0, 2.0]] * 4


# ---- plumbing ----


def test_concurrency_counts_samples_and_never_deadlocks(engine: FakeEngine):
    """Groups of 3 with room for 4 requests: at most one group at a time; groups larger than the room still run."""
    most = 0

    def reply(input_ids, params):
        nonlocal most
        most = max(most, engine.num_running)
        return Reply([1], seconds_per_token=0.01)

    engine.reply = reply
    rollout(rollout_args(engine.url, sglang_server_concurrency=4), groups_of(PROMPTS, 3))
    assert 0 < most <= 4
    GenerateState.clear_all_instances()
    rollout(rollout_args(engine.url, sglang_server_concurrency=2), groups_of(PROMPTS, 3))


def test_disabled_global_dataset_is_refused():
    with pytest.raises(ValueError, match="--disable-rollout-global-dataset"):
        generate_rollout(rollout_args(rollout_global_dataset=False), 0, ListSource([]))


def test_model_urls():
    args = rollout_args("http://10.0.0.1:30000")
    assert get_model_url(args) == "http://10.0.0.1:30000/generate"
    args.sglang_model_routers = {"judge": ("10.0.0.2", 5)}
    assert get_model_url(args, "judge", "/v1/x") == "http://10.0.0.2:5/v1/x"
    with pytest.raises(ValueError, match="no model 'jugde' is served; known: default, judge"):
        get_model_url(args, "jugde")


@pytest.mark.parametrize(
    ("load", "count"),
    [
        ({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 3}, {"num_total_reqs": 4}]}, 9),
        ([{"num_reqs": 1}, {"total_reqs": 2}], 3),
        ({"loads": []}, 0),
    ],
)
def test_load_reports_are_read_in_every_form(load, count):
    assert count_requests(load) == count


def test_the_loop_can_be_interrupted_from_outside(engine: FakeEngine):
    """Cancelling the rollout's coroutine ends its tasks and the engine's requests."""
    engine.reply = lambda *_: Reply([1] * 10, seconds_per_token=30.0)
    args = rollout_args(engine.url)
    source = ListSource(groups_of(PROMPTS, 3))

    async def interrupted():
        task = asyncio.create_task(sglang_rollout.generate_rollout_async(args, 0, source))
        while engine.num_running < 12:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return GenerateState(args).pendings

    assert run(interrupted()) == {}
    deadline = time.monotonic() + 5
    while engine.num_running and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert engine.num_running == 0
