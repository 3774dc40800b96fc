"""Rules of sampling, estimators, losses and rewards: each once broken, its message, and once kept."""

import asyncio

import pytest

from slime.rollout import rm_hub
from slime.utils import reward_types
from slime.utils.arguments.checks import algorithm, rewards
from tests.helpers.rules import Rule, check_rule, each_rule, rule_name

REINFORCE = "--advantage-estimator reinforce_plus_plus"
EVAL = "--eval-interval 1 --eval-config {dir}/eval.yaml"
RULES = {
    algorithm.check_sampling: (
        Rule(
            "--rollout-temperature 0", ("is 0, must be > 0", "--rollout-temperature 1.0"), "--rollout-temperature 0.1"
        ),
        Rule("--rollout-temperature -1", ("--rollout-temperature: is -1",)),
        Rule("--eval-temperature -0.5", ("--eval-temperature: is -0.5, must be >= 0",), "--eval-temperature 0"),
        Rule("--eval-top-p 1.5", ("--eval-top-p: is 1.5",), "--eval-top-p 1"),
        Rule("--eval-top-k 0", ("-1 (off)",), "--eval-top-k 5"),
    ),
    algorithm.check_whole_distribution: (
        Rule(
            "--rollout-top-p 0.9", ("0.9 is not supported yet: the trainer would need the tokens",), kind="unsupported"
        ),
        Rule("--rollout-top-k 5", ("5 is not supported yet", "try: --rollout-top-k -1"), kind="unsupported"),
        Rule(
            """--sglang-preferred-sampling-params '{{"min_p": 0.1}}'""",
            ("--sglang-preferred-sampling-params: min_p 0.1 is not supported",),
            """--sglang-preferred-sampling-params '{{"ignore_eos": true}}'""",
            kind="unsupported",
        ),
    ),
    algorithm.check_kl: (
        Rule(
            "--kl-coef 0.01",
            (
                "0.01 has no effect with --advantage-estimator grpo",
                "try: --kl-coef 0 --use-kl-loss --kl-loss-coef 0.01",
            ),
            f"--kl-coef 0.01 {REINFORCE} --normalize-advantages",
            also="--ref-load {hf}",
        ),
        Rule(
            "--kl-coef 0.01",
            ("--kl-coef: 0.01 has no effect",),
            "--kl-coef 0.01 --custom-advantage-function-path {dir}/mine.py:advantages",
            also="--ref-load {hf}",
        ),
        Rule(
            f"--kl-coef 0.01 --kl-loss-coef 0.02 {REINFORCE} --normalize-advantages",
            ("--kl-coef, --kl-loss-coef: 0.01 and 0.02",),
            "--kl-loss-coef 0.02",
            also="--use-kl-loss --ref-load {hf}",
        ),
    ),
    algorithm.check_estimator: (
        Rule(REINFORCE, ("try: --normalize-advantages",), f"{REINFORCE} --normalize-advantages"),
        Rule(
            "--group-rm --eval-interval 2 --eval-prompt-data held {data}",
            ("--group-rm, --eval-interval: scores whole groups",),
            "--group-rm",
        ),
    ),
    algorithm.check_groups: (
        Rule(
            "",
            ("1 with --advantage-estimator grpo", "a group of one is 0", "--n-samples-per-prompt 8"),
            "--disable-rewards-normalization",
            also="--n-samples-per-prompt 1 --global-batch-size 8",
        ),
        Rule(
            "--advantage-estimator gspo",
            ("1 with --advantage-estimator gspo",),
            "--loss-type sft_loss",
            also="--n-samples-per-prompt 1 --global-batch-size 8",
        ),
    ),
    algorithm.check_corrections: (
        Rule("--use-rollout-logprobs --use-tis", ("--use-rollout-logprobs, --use-tis",), "--use-tis"),
        Rule(
            "--get-mismatch-metrics",
            ("the metrics come from --custom-tis-function-path",),
            "--get-mismatch-metrics --custom-tis-function-path {dir}/mine.py:tis",
        ),
        Rule("--tis-clip-low 3", ("3 is above --tis-clip 2",), "--tis-clip-low 1", also="--use-tis"),
    ),
    algorithm.check_loss: (
        Rule(
            "--loss-type custom_loss",
            ("custom_loss needs --custom-loss-function-path",),
            "--loss-type custom_loss --custom-loss-function-path {dir}/mine.py:loss",
        ),
        Rule("--eps-clip-c 1", ("--eps-clip-c: is 1, must be > 1",), "--eps-clip-c 3"),
        Rule("--eps-clip-high -0.1", ("--eps-clip-high: is -0.1",), "--eps-clip-high 0.3"),
        Rule("--log-probs-chunk-size 0", ("must be -1",), "--log-probs-chunk-size 7"),
    ),
    algorithm.check_trained_parameters: (
        Rule(
            "--only-train-params-name-list a --freeze-params-name-list b",
            ("--only-train-params-name-list, --freeze-params-name-list",),
            "--freeze-params-name-list b",
        ),
    ),
    algorithm.check_critic: (
        Rule("--gamma 1.5", ("--gamma: is 1.5, must be within [0, 1]",), "--gamma 0.9"),
        Rule("--value-clip -1", ("--value-clip: is -1, must be >= 0",)),
        Rule("--num-critic-only-steps -1", ("--num-critic-only-steps: is -1",)),
        Rule("--num-critic-only-steps 2", ("2 rollouts train a critic, which grpo has not",)),
    ),
    algorithm.check_routing_replay: (
        Rule("--use-routing-replay", ("the model has none",)),
        Rule(
            "--use-rollout-logprobs",
            ("--use-routing-replay, --use-rollout-logprobs: the engines' log-probs leave out the pass",),
            also="--use-routing-replay",
            model="qwen3-30B-A3B",
        ),
    ),
    rewards.check_reward_type: (
        Rule(
            "--label-key label --rm-type maths",
            ("--rm-type: maths is unknown; known: remote_rm", "try: --rm-type math"),
            "--rm-type random",
        ),
        Rule(
            "--label-key label --rm-type boxed_mat",
            ("boxed_mat is unknown", "boxed_ in front"),
            "--rm-type boxed_gpqa",
        ),
        Rule("--label-key label --rm-type ifbench", ("ifbench is not supported yet",), kind="unsupported"),
        Rule(f"{EVAL}", ("--eval-config: held: rm_type mathematics is unknown", "try: rm_type: math")),
    ),
    rewards.check_reward_needs: (
        Rule(
            "--rm-type math",
            ("--label-key: is not given, and --rm-type math compares",),
            "--rm-type math --label-key label",
        ),
        Rule("--rm-type boxed_f1", ("--label-key",), "--rm-type boxed_f1 --label-key label"),
        Rule("--rm-type remote_rm", ("--rm-url: is not given",), "--rm-type remote_rm --rm-url http://127.0.0.1:9/"),
        Rule(
            "--rm-type dapo",
            ("--reward-key: is not given", "(score, acc, pred)", "try: --reward-key score"),
            "--rm-type dapo --reward-key score",
            also="--label-key label",
        ),
    ),
}
PLUG_INS = """
def advantages(args, rollout_data): ...
def loss(args, batch, logits, sum_of_sample_mean): ...
def tis(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths): ...
def post_process(args, samples): ...
"""


@pytest.fixture(autouse=True)
def plug_ins(case):
    (case.directory / "mine.py").write_text(PLUG_INS)
    data = f"datasets: [{{name: held, path: '{case.directory / 'train.jsonl'}', rm_type: mathematics}}]"
    (case.directory / "eval.yaml").write_text(data)


@pytest.mark.parametrize(("check", "rule"), each_rule(RULES), ids=rule_name)
def test_rule(case, check, rule):
    check_rule(case, check, rule)


def test_a_function_of_the_users_may_make_larger_groups(case):
    post_process = ("--custom-reward-post-process-path", f"{case.directory / 'mine.py'}:post_process")
    case.args(*post_process, n_samples_per_prompt=1, global_batch_size=8)


def test_a_reward_of_the_users_needs_no_label(case):
    (case.directory / "mine.py").write_text("async def score(args, sample): return 1.0")
    case.args("--rm-type", "math", "--custom-rm-path", f"{case.directory / 'mine.py'}:score")


def test_the_names_are_those_of_the_graders():
    """A name that the checks know and nobody grades would fail at the first reward, and the other way round."""
    assert set(reward_types.BUILT_IN) == {"remote_rm", *rm_hub._GRADERS}
    assert reward_types.BOXED is rm_hub.BOXED
    assert set(reward_types.NEED_LABEL) < set(reward_types.BUILT_IN)


def test_what_is_not_yet_graded_says_so():
    from slime.utils.types import Sample

    for name in reward_types.NOT_YET:
        with pytest.raises(NotImplementedError, match="not supported yet"):
            asyncio.run(rm_hub.async_rm(None, Sample(metadata={"rm_type": name})))


def test_dict_rewards_have_the_keys_that_are_listed():
    for name, keys in reward_types.SCORE_DICT.items():
        from slime.utils.types import Sample

        assert tuple(rm_hub._GRADERS[name]("Answer: 3", Sample(label="3"))) == keys
