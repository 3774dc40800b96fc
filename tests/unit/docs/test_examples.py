"""Every example of the guides, as it stands on the page, in the place of the framework where it belongs."""

import json
import re
from argparse import ArgumentParser, Namespace

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import get_parallel_state
from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function, policy_loss_function
from slime.backends.megatron_utils.loss.reduction import make_reducer
from slime.ray import driver
from slime.rollout.base_types import call_rollout_fn, flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.generation import generate_and_rm
from slime.rollout.metrics import eval_metrics, rollout_metrics
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import convert_samples_to_train_data, post_process_rewards
from slime.utils.async_utils import run
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.helpers.fake_generation_engine import Reply
from tests.helpers.gloo import run_ranks
from tests.helpers.rollout_args import ListSource, groups_of, rollout_args, write_prompts
from tests.helpers.tiny_models import make_tiny_model
from tests.unit.loss.reference import make_args, make_batch, make_samples

PROMPTS = ["ab", "cde", "f", "ghij"]


def rollout(args, groups=None) -> list[Sample]:
    return flatten_samples(generate_rollout(args, 0, ListSource(groups or groups_of(PROMPTS, 3))).samples)


def test_every_example_is_used_here(examples):
    """An example that is added to a guide without a test is named."""
    source = open(__file__).read()
    assert len(list(examples.iterdir())) >= 12
    assert [path.name for path in examples.iterdir() if path.name not in source] == []


# ---- quick start ----


@pytest.mark.parametrize("response, reward", [("37+58 is 95", 1.0), ("96", 0.1), ("no idea", 0.0), ("-95", 0.1)])
def test_my_reward(examples, response, reward):
    args = rollout_args(custom_rm_path=f"{examples}/my_reward.py:reward_func")
    assert run(async_rm(args, Sample(response=response, label="95"))) == reward


def test_my_generate(examples, engine):
    args = rollout_args(engine.url, custom_generate_function_path=f"{examples}/my_generate.py:generate")
    for sample in rollout(args):
        assert sample.tokens[: -sample.response_length] == [ord(c) % 50 for c in sample.prompt + "the answer is "]
        assert sample.response and sample.reward == sample.response_length == len(sample.rollout_log_probs)


# ---- rollout ----


def test_two_drafts(examples, engine):
    """Both drafts of an execution have its rollout_id, and together they weigh as much as one sample."""
    args = rollout_args(engine.url, custom_generate_function_path=f"{examples}/two_drafts.py:generate")
    samples = rollout(args)
    assert len(samples) == 24 and len({s.rollout_id for s in samples}) == 12
    data = convert_samples_to_train_data(args, samples)
    for i, rollout_id in enumerate(data["rollout_ids"]):
        lengths = [s.response_length for s in samples if s.rollout_id == rollout_id]
        assert len(lengths) == 2 and data["rollout_mask_sums"][i] == sum(lengths)
    sample = run(generate_and_rm(args, groups_of(["x"], 1)[0][0], {"max_new_tokens": 4}, evaluation=True))
    assert isinstance(sample, Sample)


def test_strip_thoughts(examples, engine):
    args = rollout_args(
        engine.url,
        rollout_sample_hook_path=[f"{examples}/strip_thoughts.py:hook"],
        custom_rm_path=None,
        rm_type="exact",
    )
    engine.reply = lambda *_: Reply([7])
    groups = groups_of(PROMPTS, 3)
    for sample in flatten_samples(groups):
        sample.label = "<7>"
    samples = rollout(args, groups)
    assert {s.reward for s in samples} == {1} and samples[0].metadata["whole_response"] == "<7>"
    sample = Sample(response="5? no.</think> 4")
    load_function(f"{examples}/strip_thoughts.py:hook")(args, sample)
    assert sample.response == " 4"


def test_graded(examples):
    args = rollout_args(custom_rm_path=f"{examples}/graded.py:reward_func", reward_key="score")
    samples = [Sample(response=text, label="95") for text in ("95", "it is 95", "96", "")]
    rewards = run(batched_async_rm(args, samples))
    assert [reward["score"] for reward in rewards] == pytest.approx([1.0, 0.8, 0.0, 0.0])
    assert rewards[0] == run(async_rm(args, samples[0])) == {"score": 1.0, "kind": "right"}


def test_filters(examples, engine):
    """Groups that are always right are dropped and replaced; cut samples lose their mask; the count is saved."""
    path = f"{examples}/filters.py"
    engine.reply = lambda ids, params: Reply([7] * (1 if ids == [ord("a") % 50, ord("b") % 50] else 9))
    args = rollout_args(
        engine.url,
        rollout_batch_size=3,
        over_sampling_batch_size=3,
        rollout_max_response_len=5,
        dynamic_sampling_filter_path=f"{path}:not_too_easy",
        rollout_sample_filter_path=f"{path}:leave_out_truncated",
        rollout_all_samples_process_path=f"{path}:remember",
    )
    source = ListSource(groups_of([*PROMPTS, "kl", "mno"], 3))
    metadata = {"groups_seen": 10}
    source.get_metadata, source.update_metadata = lambda: metadata, metadata.update
    output = generate_rollout(args, 0, source)
    assert output.metrics["rollout/dynamic_filter/drop_too_easy"] == 1
    samples = flatten_samples(output.samples)
    assert len(samples) == 9 and all(s.remove_sample and s.reward == 5 for s in samples)
    assert sum(sum(mask) for mask in convert_samples_to_train_data(args, samples)["loss_masks"]) == 0
    assert metadata["groups_seen"] >= 10 + 4


def test_newest_first(examples, engine, tmp_path):
    path = write_prompts(tmp_path, PROMPTS)
    args = rollout_args(prompt_data=path, buffer_filter_path=f"{examples}/filters.py:newest_first")
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(groups_of(["old", "newer", "newest"], 3))
    assert [group[0].prompt for group in source.get_samples(2)] == ["newer", "newest"]
    assert [group[0].prompt for group in source.get_samples(2)] == ["old", "ab"]


def test_squares(examples, engine):
    args = rollout_args(engine.url)
    source = load_function(f"{examples}/squares.py:Squares")(args)
    samples = flatten_samples(generate_rollout(args, 0, source).samples)
    assert [s.label for s in samples[::3]] == ["0", "1", "4", "9"] and [s.index for s in samples] == list(range(12))
    resumed = load_function(f"{examples}/squares.py:Squares")(args)
    resumed.load(0)
    assert [g[0].prompt for g in resumed.get_samples(1)] == [g[0].prompt for g in source.get_samples(1)]
    assert len(source) == 10_000


def test_echo(examples, engine):
    args = rollout_args()
    echo = load_function(f"{examples}/echo.py:generate_rollout")
    output = call_rollout_fn(echo, args, 0, ListSource(groups_of(PROMPTS, 3)), evaluation=False)
    data = convert_samples_to_train_data(args, flatten_samples(output.samples))
    assert data["response_lengths"] == [2] * 12 and data["rollout_log_probs"] == [[-0.5, -0.5]] * 12
    output = call_rollout_fn(echo, args, 0, None, evaluation=True)
    assert eval_metrics(0, args, output.data, output.metrics)["eval/echo"] == 1.0


# ---- between rollout and training ----


def scored() -> list[Sample]:
    samples = flatten_samples(groups_of(["a", "b"], 3))
    for sample, reward in zip(samples, (3.0, -2.0, 0.5, 0.0, 1.0, -0.5), strict=True):
        sample.reward, sample.tokens = reward, [1] * (4 + sample.index)
        sample.response_length, sample.response = 2 + sample.index, "x" * sample.index
        sample.status = Sample.Status.COMPLETED
    return samples


def test_train_data(examples):
    args = rollout_args(custom_reward_post_process_path=f"{examples}/train_data.py:clip_and_center")
    raw, rewards = post_process_rewards(args, scored())
    assert raw == [3.0, -2.0, 0.5, 0.0, 1.0, -0.5]
    assert rewards == pytest.approx([r - 1 / 6 for r in (1, -1, 0.5, 0, 1, -0.5)])
    args = rollout_args(custom_convert_samples_to_train_data_path=f"{examples}/train_data.py:convert")
    data = convert_samples_to_train_data(args, scored())
    assert data["loss_masks"] == [[0] * (1 + i) + [1] for i in range(6)]
    assert data["rollout_ids"] == list(range(6)) and data["rollout_mask_sums"] == [1] * 6


def test_log(examples, tmp_path):
    args = rollout_args(
        custom_rollout_log_function_path=f"{examples}/log.py:log_rollout",
        custom_eval_rollout_log_function_path=f"{examples}/log.py:log_eval",
    )
    args.longest_responses = str(tmp_path / "longest.jsonl")
    samples = scored()
    assert rollout_metrics(4, args, samples, None, 1.0)["rollout/raw_reward"] == pytest.approx(2 / 6)
    data = {"held_out": {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": samples[:2]}}
    assert eval_metrics(4, args, data, None)["eval/held_out"] == 0.5
    rows = [json.loads(line) for line in open(args.longest_responses)]
    assert rows == [{"rollout": 4, "response": "xxxxx"}, {"eval": 4, "sizes": {"held_out": 2}}]


# ---- trainer ----


def test_losses(examples):
    path, samples = f"{examples}/losses.py", make_samples(3, 4)
    data = {key: [s[key] for s in samples] for key in samples[0]}
    data |= {"rewards": [0.5, -0.5, 0.0, 2.0], "advantages": None, "returns": None}
    compute_advantages_and_returns(make_args(custom_advantage_function_path=f"{path}:sign_advantage"), data)
    for advantages, sign, length in zip(data["advantages"], (1, -1, -1, 1), data["response_lengths"], strict=True):
        assert advantages.tolist() == [sign] * length

    batch, logits = make_batch(samples)
    args = make_args(loss_type="custom_loss", custom_loss_function_path=f"{path}:weighted_likelihood")
    loss, _, log = loss_function(args, batch, 1, 1, logits)
    expected = 0.0
    for sample in samples:
        start, tokens = sample["total_lengths"] - sample["response_lengths"], sample["tokens"]
        log_p = sample["logits"][start - 1 : -1].double().log_softmax(-1).gather(1, tokens[start:, None])[:, 0]
        terms = -sample["advantages"] * log_p * sample["loss_masks"]
        expected += float(terms.sum() / sample["rollout_mask_sums"].clamp(min=1))
    assert float(loss) == pytest.approx(expected, rel=1e-5) and log["keys"] == ["loss", "mean_log_prob"]

    args = make_args(use_tis=True, custom_tis_function_path=f"{path}:ignore_unlikely")
    _, metrics = policy_loss_function(
        args, batch, logits, make_reducer(args, batch, batch["loss_masks"], get_parallel_state())
    )
    ratios = torch.cat([s["log_probs"] - s["rollout_log_probs"] for s in samples]).exp()
    kept = ((ratios < 2) & (ratios > 0.5)).float()
    assert 0 < kept.mean() < 1
    per_sample = kept.split([s["response_lengths"] for s in samples])
    wanted = sum(
        float((k * s["loss_masks"]).sum() / s["rollout_mask_sums"].clamp(min=1))
        for k, s in zip(per_sample, samples, strict=True)
    )
    assert float(metrics["kept"]) == pytest.approx(wanted, rel=1e-5)

    args = make_args(custom_pg_loss_reducer_function_path=f"{path}:constant_denominator")
    reducer = make_reducer(args, batch, batch["loss_masks"], get_parallel_state())
    _, metrics = policy_loss_function(args, batch, logits, reducer)
    plain = make_args(calculate_per_token_loss=True)
    tokens = make_reducer(plain, batch, batch["loss_masks"], get_parallel_state())
    _, summed = policy_loss_function(plain, batch, logits, tokens)
    assert float(metrics["pg_loss"]) == pytest.approx(float(summed["pg_loss"]) / 1000, rel=1e-5)


def _train_with_hooks(rank: int, world_size: int, hf: str, path: str) -> dict:
    """What the hooks logged in one rollout of two steps, and the metrics without and with hooks."""
    import logging

    from tests.helpers.trainer import trainer_args
    from tests.helpers.trainer_runs import open_trainer, train_rollouts

    lines = []

    class Collect(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    names = {
        "custom_megatron_init_path": "after_init",
        "custom_megatron_before_log_prob_hook_path": "before_log_prob",
        "custom_megatron_before_train_step_hook_path": "before_train_step",
        "rollout_data_postprocess_path": "postprocess",
        "custom_model_provider_path": "provider",
    }
    results = {}
    for kind in ("plain", "hooked"):
        hooks = {flag: f"{path}:{name}" for flag, name in names.items()} if kind == "hooked" else {}
        args = trainer_args("qwen3", hf, global_batch_size=4, ref_load=hf, **hooks)
        logger = logging.getLogger(load_function(f"{path}:after_init").__module__)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler := Collect())
        with open_trainer(args, rank, world_size, with_ref=True) as trainer:
            logging.disable(logging.NOTSET)
            results[kind] = train_rollouts(trainer, range(1))[0]
        logger.removeHandler(handler)
    return results | {"lines": lines}


def test_trainer_hooks(examples, tmp_path):
    hf = make_tiny_model("qwen3", tmp_path)
    (result,) = run_ranks(_train_with_hooks, 1, str(hf), f"{examples}/trainer_hooks.py")
    lines = result["lines"]
    assert [re.sub(r" [\d.e-]+$", "", line) for line in lines if "ready" not in line] == [
        "log-probs of the reference",
        "log-probs of the policy",
        "rollout 0 step 0: learning rate",
        "rollout 0 step 1: learning rate",
    ]
    plain, hooked = result["plain"], result["hooked"]
    assert hooked["rollout/log_probs"] == plain["rollout/log_probs"]  # the provider builds the same model
    assert hooked["rollout/advantages"] > plain["rollout/advantages"]


# ---- driver ----


def test_my_train(examples, monkeypatch):
    """The launcher hands its own flag to the parser and its training function to the driver."""
    seen = {}

    def parse(argv=None, *, add_custom_arguments):
        parser = add_custom_arguments(ArgumentParser())
        return parser.parse_args(["--brevity-bonus", "0.5"])

    def drive(train, args):
        seen.update(train=train, args=args)
        return 0

    monkeypatch.setattr("slime.utils.arguments.parse_args", parse)
    monkeypatch.setattr(driver, "run_driver", drive)
    code = compile((examples / "my_train.py").read_text(), "my_train.py", "exec")
    with pytest.raises(SystemExit) as stop:
        exec(code, {"__name__": "__main__"})
    assert stop.value.code == 0 and seen["args"] == Namespace(brevity_bonus=0.5)
    assert seen["train"].__module__ == "train"
