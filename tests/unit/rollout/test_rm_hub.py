"""Dispatch of rewards: which grader, in which form, and what is no usable reward. Also the remote service."""

import asyncio
from argparse import Namespace

import httpx
import numpy as np
import pytest
import torch

from slime.rollout import rm_hub
from slime.rollout.generate_state import GenerateState
from slime.rollout.rm_hub import async_rm, batched_async_rm, remote, unscored_counts
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample
from tests.helpers.fake_generation_engine import Reply
from tests.helpers.rollout_args import ListSource, groups_of, rollout_args


def make_args(**values) -> Namespace:
    base = {"rm_type": None, "custom_rm_path": None, "reward_key": None, "eval_reward_key": None, "rm_url": None}
    return Namespace(**{**base, "custom_reward_post_process_path": None, **values})


def reward(sample: Sample, **args):
    return asyncio.run(async_rm(make_args(**args), sample))


@pytest.fixture
def plugin(tmp_path):
    """Writes a module with the given functions; returns the path prefix of load_function."""

    def write(source: str) -> str:
        file = tmp_path / f"rm_{abs(hash(source))}.py"
        file.write_text(source)
        return f"{file}:"

    return write


# ---- dispatch ----


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "expected"),
    [
        ("math", r"so \boxed{0.5}", "1/2", 1),
        ("math", "5", "5", 0),
        ("deepscaler", r"</think>\boxed{5}", "5", 1),
        ("f1", "a cat", "cat", 1.0),
        ("gpqa", "The answer is C", "C", 1.0),
        ("exact", " 95\n", "95", 1),
        ("exact", "95", 95, 1),
        ("exact", "94", "95", 0),
        ("boxed_math", r"Answer: \boxed{5}", "5", 1),  # K11
        ("boxed_math", r"Answer: \boxed{6}", "5", 0),
        ("boxed_math", "Answer: 5", "5", 0),
        ("boxed_deepscaler", r"no marker \boxed{5}", "5", 1),
        ("boxed_deepscaler", "5", "5", 0),
        ("boxed_gpqa", r"A or B: \boxed{C}", "C", 1.0),
        ("boxed_f1", r"long talk \boxed{the cat}", "cat", 1.0),
        ("boxed_exact", r"\boxed{95}", "95", 1),
        ("boxed_exact", "95", "95", 0),
    ],
)
def test_built_in_types(rm_type, response, label, expected):
    assert reward(Sample(response=response, label=label), rm_type=rm_type) == expected
    by_metadata = Sample(response=response, label=label, metadata={"rm_type": rm_type})
    assert reward(by_metadata, rm_type="random") == expected


@pytest.mark.parametrize(("rm_type", "response"), [("dapo", "Answer: 5"), ("boxed_dapo", r"\boxed{5}")])
def test_dapo_needs_the_key_of_its_dict(rm_type, response):
    sample = Sample(index=3, response=response, label="5")
    assert reward(sample, rm_type=rm_type, reward_key="score") == {"score": 1.0, "acc": True, "pred": "5"}
    with pytest.raises(ValueError, match="index=3.*keys \\(score, acc, pred\\) with --reward-key"):
        reward(sample, rm_type=rm_type)
    assert reward(Sample(response=response, label="6"), rm_type=rm_type, reward_key="score")["score"] == -1.0


@pytest.mark.parametrize("rm_type", [None, "", "nonsense", "boxed_", "boxed_nonsense"])
def test_unknown_types_list_the_known_ones(rm_type):
    with pytest.raises(NotImplementedError, match="is unknown; .*deepscaler, math, dapo"):
        reward(Sample(), rm_type=rm_type)


def test_ifbench_is_refused_clearly():
    with pytest.raises(NotImplementedError, match="'ifbench' is not supported yet"):
        reward(Sample(), rm_type="ifbench")


@pytest.mark.parametrize("rm_type", ["exact", "f1"])
def test_graders_of_text_need_a_label(rm_type):
    with pytest.raises(ValueError, match="index=4.*needs a label"):
        reward(Sample(index=4, response="x"), rm_type=rm_type)


def test_random_rewards_take_both_values_and_repeat_for_a_sample():
    values = [reward(Sample(index=i, response="r"), rm_type="random") for i in range(50)]
    assert set(values) == {0, 1}
    assert values == [reward(Sample(index=i, response="r"), rm_type="random") for i in range(50)]
    assert {reward(Sample(), rm_type="random") for _ in range(50)} == {0, 1}


def test_zeros_for_want_of_a_box_or_a_label_are_counted():
    before = unscored_counts()
    reward(Sample(response="I don't know.", label="5"), rm_type="math")
    reward(Sample(response="", label="5"), rm_type="boxed_math")
    reward(Sample(response=r"\boxed{5}", label=None), rm_type="deepscaler")
    reward(Sample(response=r"\boxed{6}", label="5"), rm_type="math")  # graded, and wrong
    after = unscored_counts()
    assert after["no boxed answer"] - before.get("no boxed answer", 0) == 2
    assert after["no label"] - before.get("no label", 0) == 1


# ---- custom functions ----


def test_precedence_of_custom_functions(plugin):
    path = plugin(
        "async def seven(args, sample, **kw):\n    return 7\nasync def eight(args, sample, **kw):\n    return 8\n"
    )
    graded = {"response": r"\boxed{5}", "label": "5"}
    assert reward(Sample(**graded), rm_type="math", custom_rm_path=path + "seven") == 7
    assert reward(Sample(custom_rm_path=path + "eight", **graded), custom_rm_path=path + "seven") == 8
    assert reward(Sample(custom_rm_path="", **graded), rm_type="math", custom_rm_path=path + "seven") == 1


def test_k46_what_is_no_number_is_an_error_unless_a_post_process_reads_it(plugin):
    path = plugin("async def rm(args, sample, **kw):\n    return sample.label\n") + "rm"
    for bad in ("good", None, float("nan"), [1]):
        with pytest.raises(ValueError, match="sample index=5 group_index=2: reward must be a finite number"):
            reward(Sample(index=5, group_index=2, label=bad), custom_rm_path=path)
    with pytest.raises(ValueError, match="reward\\['score'\\] must be a finite number, got str 'a'"):
        reward(Sample(label={"score": "a"}), custom_rm_path=path, reward_key="score")
    with pytest.raises(ValueError, match="--reward-key acc is not in the reward \\(keys: score\\)"):
        reward(Sample(label={"score": 1}), custom_rm_path=path, reward_key="acc")
    with pytest.raises(ValueError, match="reward\\['score'\\] must be a finite number, got float 'nan'"):
        reward(Sample(label={"score": float("nan"), "acc": 1}), custom_rm_path=path, reward_key="score")
    assert reward(Sample(label="good"), custom_rm_path=path, custom_reward_post_process_path="x.y") == "good"
    assert reward(Sample(label={"acc": 1}), custom_rm_path=path, reward_key="a", eval_reward_key="acc") == {"acc": 1}


@pytest.mark.parametrize("scalar", [torch.tensor(0.5), np.float32(0.5), np.array(0.5)])
def test_scalars_of_numpy_and_torch_become_numbers(plugin, scalar):
    path = plugin("async def rm(args, sample, **kw):\n    return sample.label\n") + "rm"
    result = reward(Sample(label=scalar), custom_rm_path=path)
    assert type(result) is float and result == 0.5


# ---- batches ----


def batch(samples: list[Sample], **args) -> list:
    return asyncio.run(batched_async_rm(make_args(**args), samples))


def test_k30_a_batch_gives_one_reward_a_sample_in_order():
    responses = [r"\boxed{137}", "I don't know.", r"\boxed{1}", "", r"so \boxed{137}"]
    assert batch([Sample(response=r, label="137") for r in responses], rm_type="math") == [1, 0, 0, 0, 1]
    assert batch([], rm_type="math") == []


def test_a_custom_function_gets_the_list_and_samples_keep_their_own_paths(plugin):
    path = plugin(
        "async def whole(args, samples, **kw):\n    return [100 * len(samples) + s.index for s in samples]\n"
        "async def own(args, samples, **kw):\n    return [-s.index for s in samples]\n"
    )
    samples = [Sample(index=i) for i in range(5)]
    samples[1].custom_rm_path = samples[3].custom_rm_path = path + "own"
    samples[4] = Sample(index=4, custom_rm_path="", response=r"\boxed{5}", label="5")
    assert batch(samples, custom_rm_path=path + "whole", rm_type="math") == [200, -1, 202, -3, 1]


@pytest.mark.parametrize(("returned", "got"), [("[1]", "1 rewards"), ("1.0", "float"), ("None", "NoneType")])
def test_a_batch_function_must_return_one_reward_a_sample(plugin, returned, got):
    path = plugin(f"async def rm(args, samples, **kw):\n    return {returned}\n") + "rm"
    with pytest.raises(ValueError, match=f"got 2 samples and must return as many rewards, got {got}"):
        batch([Sample(), Sample()], custom_rm_path=path)


def test_a_bad_reward_in_a_batch_names_its_sample(plugin):
    path = plugin("async def rm(args, samples, **kw):\n    return [1, float('inf')]\n") + "rm"
    with pytest.raises(ValueError, match="index=8"):
        batch([Sample(index=7), Sample(index=8)], custom_rm_path=path)


# ---- remote ----


class Service:
    """Stands in for the HTTP client: answers with the given statuses, then with the reward; remembers what it got."""

    def __init__(self, *failures: int | Exception, body: str = "0.75"):
        self.failures, self.body, self.payloads, self.slept = list(failures), body, [], []

    async def post(self, url, json):
        self.payloads.append(json)
        failure = self.failures.pop(0) if self.failures else 200
        if isinstance(failure, Exception):
            raise failure
        return httpx.Response(
            failure, text=self.body if failure == 200 else "sorry", request=httpx.Request("POST", url)
        )

    async def sleep(self, seconds):
        self.slept.append(seconds)

    def install(self, monkeypatch) -> "Service":
        monkeypatch.setattr(remote, "_client", lambda: self)
        monkeypatch.setattr(remote.asyncio, "sleep", self.sleep)
        return self


URL = "http://reward.test/score"


def test_the_remote_service_gets_prompt_response_and_label(monkeypatch):
    service = Service().install(monkeypatch)
    sample = Sample(prompt="p", response=r"r \boxed{5}", label={"a": 1})
    assert reward(sample, rm_type="remote_rm", rm_url=URL) == 0.75
    assert reward(sample, rm_type="boxed_remote_rm", rm_url=URL) == 0.75
    assert [p["response"] for p in service.payloads] == [r"r \boxed{5}", "5"]
    assert service.payloads[0] == {"prompt": "p", "response": r"r \boxed{5}", "label": {"a": 1}}


def test_remote_failures_are_retried_with_growing_pauses(monkeypatch):
    service = Service(500, httpx.ConnectError("refused"), 429).install(monkeypatch)
    assert reward(Sample(), rm_type="remote_rm", rm_url=URL) == 0.75
    assert len(service.slept) == 3
    assert all(2**k <= pause <= 2**k + 1 for k, pause in enumerate(service.slept, start=1))


def test_ten_failures_are_an_error_naming_url_and_cause(monkeypatch):
    service = Service(*[503] * 20).install(monkeypatch)
    with pytest.raises(RuntimeError, match=f"{URL} failed, attempt 10 of 10: status 503: sorry"):
        reward(Sample(), rm_type="remote_rm", rm_url=URL)
    assert len(service.payloads) == 10 and max(service.slept) <= 31


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_client_error_is_not_retried(monkeypatch, status):
    service = Service(status).install(monkeypatch)
    with pytest.raises(RuntimeError, match=f"attempt 1 of 10: status {status}"):
        reward(Sample(), rm_type="remote_rm", rm_url=URL)
    assert len(service.payloads) == 1


def test_remote_without_url():
    with pytest.raises(ValueError, match="needs --rm-url"):
        reward(Sample(), rm_type="remote_rm")


def test_a_real_http_service_is_asked_over_a_client_of_this_loop():
    async def serve_and_ask():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\n0.5")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        args = make_args(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            return await asyncio.gather(*(async_rm(args, Sample()) for _ in range(5)))

    for _ in range(2):  # a second loop must not inherit the first one's connections
        assert asyncio.run(serve_and_ask()) == [0.5] * 5


def test_public_names_are_importable():
    for name in ("async_rm", "batched_async_rm", "remote_rm", "get_deepscaler_rule_based_reward"):
        assert callable(getattr(rm_hub, name))


def test_unscored_responses_are_counted_per_rollout(engine):
    """Two rollouts of two groups of three; only the answers to the first prompt have no box."""
    engine.reply = lambda *_: Reply([1])
    args = rollout_args(
        engine.url, custom_rm_path=None, rm_type="math", rollout_batch_size=2, over_sampling_batch_size=2
    )
    for rollout_id, boxed, expected in ((0, [False, True], 3), (1, [False, False], 6), (2, [True, True], None)):
        groups = groups_of(["ab", "cde"], 3)
        for group, has_box in zip(groups, boxed, strict=True):
            for sample in group:
                sample.label, sample.response = "1", r"\boxed{1}" if has_box else "1"
        metrics = generate_rollout(args, rollout_id, ListSource(groups)).metrics
        assert metrics.get("rollout/unscored/no_boxed_answer") == expected


def test_min_p_is_refused_where_runs_must_repeat(engine):
    args = rollout_args(engine.url, sglang_enable_deterministic_inference=True)
    state, sample = GenerateState(args), Sample(index=7)
    assert state.params_for(sample, {"min_p": 0.0})["sampling_seed"] >= 0
    with pytest.raises(ValueError, match="index=7: sampling parameter min_p 0.1"):
        state.params_for(sample, {"min_p": 0.1})
