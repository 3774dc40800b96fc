"""Rules of run length, batches and lengths: each once broken, its message, and once kept."""

import pytest

from slime.utils.arguments.checks import batch, lengths
from tests.helpers.rules import Rule, check_rule, each_rule, rule_name

DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu 64"
RULES = {
    batch.check_ranges: (
        Rule("--micro-batch-size 0", ("--micro-batch-size: is 0, must be at least 1",), "--micro-batch-size 1"),
        Rule("--num-layers 0", ("--num-layers: is 0, must be at least 1",), others=True),
        Rule("--num-experts -1", ("--num-experts: is -1, must be at least 0",), others=True),
        Rule("--num-rollout -1", ("--num-rollout: is -1, must be at least 0",), "--num-rollout 2"),
    ),
    batch.check_run_length: (
        Rule("", ("--num-rollout, --num-epoch: the length of the run",), "--num-epoch 2", without=("--num-rollout",)),
        Rule(
            "--num-epoch 2 --disable-rollout-global-dataset",
            ("--num-epoch: epochs need slime's data set",),
            "--num-epoch 2",
            without=("--num-rollout",),
        ),
    ),
    batch.check_batch_identity: (
        Rule(
            "--global-batch-size 12",
            ("8 x --n-samples-per-prompt 4 = 32", "not a multiple of 12: 8 of each rollout", "--global-batch-size 8"),
            "--global-batch-size 16",
        ),
        Rule(
            "--num-steps-per-rollout 5",
            ("32 responses do not divide into 5 steps", "try: --num-steps-per-rollout 1"),
            "--num-steps-per-rollout 1",
        ),
        Rule(
            "--num-steps-per-rollout 5",
            ("32 responses do not divide into 5 steps", "try: --num-steps-per-rollout 4"),
            "--num-steps-per-rollout 8",
            without=("--global-batch-size",),
        ),
        Rule(
            "--num-steps-per-rollout 4",
            ("32 responses / 4 steps = 8 per step, but --global-batch-size is 32", "try: --global-batch-size 8"),
            "--num-steps-per-rollout 4 --global-batch-size 8",
        ),
        Rule(
            "", ("--global-batch-size: is not given", "32"), "--global-batch-size 32", without=("--global-batch-size",)
        ),
        Rule(
            "--num-rollout 2 --n-samples-per-prompt 8 --global-batch-size 256",
            ("8 x --n-samples-per-prompt 8 = 64", "--num-rollout 2 = 128 in all", "64 // 256 = 0 optimizer steps"),
            "--num-rollout 2 --n-samples-per-prompt 8 --global-batch-size 64",
        ),
    ),
    batch.check_micro_batches: (
        Rule(
            "--micro-batch-size 3",
            ("32 is not a multiple of --micro-batch-size 3 x 2 data-parallel ranks = 6",),
            "--micro-batch-size 4",
        ),
        Rule(
            "--global-batch-size 1",
            ("1 samples < 2 data-parallel ranks = 2: some rank would have nothing to train on",),
            "--global-batch-size 2",
            also=DYNAMIC,
        ),
        Rule(
            "--global-batch-size 1",
            ("1 samples < 1 data-parallel ranks x 2 micro-batches per virtual stage = 2",),
            "--global-batch-size 2",
            also=f"{DYNAMIC} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
        ),
    ),
    batch.check_sampling_batches: (
        Rule("--use-dynamic-batch-size", ("--max-tokens-per-gpu: --use-dynamic-batch-size packs",), DYNAMIC),
        Rule("--balance-by-flops", ("--balance-by-flops: needs --use-dynamic",), f"--balance-by-flops {DYNAMIC}"),
        Rule(
            "--over-sampling-batch-size 7",
            ("7 is less than --rollout-batch-size 8",),
            "--over-sampling-batch-size 9",
        ),
    ),
    lengths.check_response_limit: (
        Rule(
            "",
            ("--rollout-max-response-len: is not given", "try: --rollout-max-response-len 1024"),
            "--rollout-max-response-len 9",
            without=("--rollout-max-response-len",),
        ),
    ),
    lengths.check_context: (
        Rule(
            "--rollout-max-prompt-len 100",
            ("100 leaves no room for a response", "100 - 1 = 99", "try: --rollout-max-prompt-len 99"),
            "--rollout-max-prompt-len 99",
            also="--rollout-max-context-len 100",
        ),
        Rule(
            "--rollout-max-response-len 100",
            (
                "100 never fits into --rollout-max-context-len 100 beside a prompt",
                "try: --rollout-max-response-len 99",
            ),
            "--rollout-max-response-len 99",
            also="--rollout-max-context-len 100",
        ),
        Rule(
            "--eval-min-new-tokens 9 --eval-max-response-len 8",
            ("9 is above --eval-max-response-len 8",),
            "--eval-min-new-tokens 8 --eval-max-response-len 8",
        ),
    ),
    lengths.check_model_length: (
        Rule(
            "--rollout-max-response-len 40900 --rollout-max-prompt-len 61",
            ("40900 + --rollout-max-prompt-len 61 = 40961", "context of 40960 tokens", "-response-len 40899"),
            "--rollout-max-response-len 40900 --rollout-max-prompt-len 60",
            model="qwen3-4B",
        ),
        Rule(
            "--rollout-max-context-len 65",
            ("65 does not fit into the engines' context of 64 tokens (--sglang-context-length)",),
            "--rollout-max-context-len 64",
            also="--sglang-context-length 64",
        ),
        Rule(
            "--eval-max-response-len 64",
            ("held: a response of 64 + a prompt of at least 1 = 65", "try: --eval-max-response-len 63"),
            "--eval-max-response-len 63",
            also="--sglang-context-length 64 --eval-interval 1 --eval-prompt-data held {data}",
        ),
    ),
}


@pytest.mark.parametrize(("check", "rule"), each_rule(RULES), ids=rule_name)
def test_rule(case, check, rule):
    check_rule(case, check, rule)


def test_evaluation_only_needs_no_batches(case):
    """A run of 0 rollouts with evaluations used to be refused for the batches that it does not have."""
    more = ("--eval-prompt-data", "held", str(case.directory / "train.jsonl"), "--eval-max-response-len", "9")
    without = ("--global-batch-size", "--prompt-data", "--rollout-max-response-len")
    assert case.args(*more, without=without, num_rollout=0, eval_interval=1).num_rollout == 0


def test_training_alone_needs_no_response_length(case):
    case.args("--debug-train-only", without=("--rollout-max-response-len",))


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        (None, 100),
        ({"factor": 4.0}, 400),
        ({"factor": 4.0, "original_max_position_embeddings": 25}, 100),
        ({"factor": 8.0, "rope_type": "llama3"}, 100),
    ],
)
def test_a_stretched_context_counts_as_sglang_counts_it(scaling, tokens):
    assert lengths.model_length({"max_position_embeddings": 100, "rope_scaling": scaling}) == tokens


def test_a_function_of_the_users_may_send_what_it_likes(case):
    (case.directory / "agent.py").write_text("async def play(args, sample, sampling_params): ...")
    agent = ("--custom-generate-function-path", f"{case.directory / 'agent.py'}:play")
    case.args(*agent, "--sglang-context-length", "10")
