"""Evaluation: every prompt of every dataset, in order, with the dataset's own settings."""

import pytest

from slime.rollout.eval_rollout import eval_groups
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample
from tests.helpers.fake_generation_engine import FakeEngine, Reply
from tests.helpers.rollout_args import CharTokenizer, ListSource, rollout_args, write_prompts

HERE = __name__


def config(tmp_path, name="math", prompts=("ab", "cde", "f"), **fields) -> EvalDatasetConfig:
    folder = tmp_path / name
    folder.mkdir()
    values = {
        "n_samples_per_eval_prompt": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_response_len": 5,
        "input_key": "prompt", "metadata_key": "metadata", "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
    } | fields  # fmt: skip
    return EvalDatasetConfig(name=name, path=write_prompts(folder, list(prompts)), **values)


def evaluate(args):
    return generate_rollout(args, 4, ListSource([]), evaluation=True).data


def test_all_datasets_with_their_own_settings(engine: FakeEngine, tmp_path):
    engine.reply = lambda input_ids, params: Reply([1] * len(input_ids) * 2)
    first = config(tmp_path, stop=["x"], min_new_tokens=1)
    second = config(
        tmp_path, "code", ("ghij",), max_response_len=50, n_samples_per_eval_prompt=1, repetition_penalty=1.5
    )
    data = evaluate(rollout_args(engine.url, eval_datasets=[first, second], rollout_stop_token_ids=[9]))
    assert list(data) == ["math", "code"]
    assert data["math"]["rewards"] == [4.0, 4.0, 5.0, 5.0, 2.0, 2.0]
    assert data["math"]["truncated"] == [False, False, True, True, False, False]
    assert [(s.index, s.group_index, s.prompt) for s in data["math"]["samples"]] == [
        (0, 0, "ab"), (1, 0, "ab"), (2, 1, "cde"), (3, 1, "cde"), (4, 2, "f"), (5, 2, "f")
    ]  # fmt: skip
    assert data["code"]["rewards"] == [8.0]
    for request in engine.requests:
        params = request["sampling_params"]
        assert params["stop_token_ids"] == [9] and params["no_stop_trim"] is True
        if request["input_ids"] == CharTokenizer().encode("ghij"):
            assert (
                params["max_new_tokens"] == 50
                and params["repetition_penalty"] == 1.5
                and "min_new_tokens" not in params
            )
        else:
            assert params["temperature"] == 0.5 and params["top_p"] == 0.9 and params["top_k"] == 3
            assert params["stop"] == ["x"] and params["min_new_tokens"] == 1 and params["max_new_tokens"] == 5


async def changes_its_parameters(args, sample, sampling_params, evaluation):
    assert evaluation and "mine" not in sampling_params
    sampling_params["mine"] = 1
    sample.tokens, sample.response_length, sample.status = [1, 2], 1, Sample.Status.COMPLETED
    return sample


async def score_and_accuracy(args, sample, **kwargs):
    assert sample.metadata == {"rm_type": "mine", "level": 3}
    return {"score": 1, "acc": sample.index}


def test_per_dataset_functions_and_reward_keys(engine: FakeEngine, tmp_path):
    dataset = config(
        tmp_path, custom_generate_function_path=f"{HERE}.changes_its_parameters",
        custom_rm_path=f"{HERE}.score_and_accuracy",
        rm_type="mine", metadata_overrides={"level": 3},
    )  # fmt: skip
    args = rollout_args(engine.url, eval_datasets=[dataset], reward_key="score")
    assert evaluate(args)["math"]["rewards"] == [1.0] * 6
    args.eval_reward_key = "acc"
    assert evaluate(args)["math"]["rewards"] == [0, 1, 2, 3, 4, 5]
    assert engine.requests == []
    args.eval_reward_key = "typo"
    with pytest.raises(ValueError, match="eval dataset math, sample 0: reward has no 'typo' .keys: score, acc"):
        evaluate(args)


def test_context_limit_and_group_rm(engine: FakeEngine, tmp_path):
    engine.reply = lambda *_: Reply([1] * 100)
    args = rollout_args(
        engine.url, eval_datasets=[config(tmp_path)], eval_max_context_len=4, rollout_max_context_len=3
    )
    assert {len(s.tokens) for s in evaluate(args)["math"]["samples"]} == {4}
    args.group_rm = True
    with pytest.raises(ValueError, match="--group-rm"):
        evaluate(args)


def test_seeds_repeat_and_differ_between_samples(engine: FakeEngine, tmp_path):
    args = rollout_args(engine.url, eval_datasets=[config(tmp_path)], sglang_enable_deterministic_inference=True)
    first, second = evaluate(args), evaluate(args)
    assert [s.tokens for s in first["math"]["samples"]] == [s.tokens for s in second["math"]["samples"]]
    requests = [(r["sampling_params"]["sampling_seed"], len(r["input_ids"])) for r in engine.requests]
    assert len({seed + i for seed, entries in requests for i in range(entries)}) == 6


def test_the_dataset_is_read_once_and_stays_as_it_is(engine: FakeEngine, tmp_path):
    dataset = config(tmp_path, metadata_overrides={"x": []})
    args = rollout_args(engine.url, eval_datasets=[dataset])
    first = eval_groups(args, dataset)
    first[0][0].metadata["x"].append(1)
    first[0][0].tokens.append(1)
    second = eval_groups(args, dataset)
    assert second[0][0].metadata == {"x": []} and second[0][0].tokens == []
