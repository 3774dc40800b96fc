"""Flags without effect and choices that are rarely meant come in one warning; the others are not mentioned."""

import json
import shlex

import pytest

from slime.utils.arguments import read_args
from slime.utils.arguments.notes import NOT_SLIMES_LOOP, NUMERICS, RULES
from tests.helpers.model_configs import CONFIGS, config_of
from tests.helpers.rules import MANY_GPUS

PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 64"
EVAL = "--eval-interval 2 --eval-prompt-data a {data}"
# tokens where the flag has no effect, the words of the warning, tokens where it has one
CASES = [
    ("--ref-load {hf} --load {ckpt}", "--ref-load has no effect", "--ref-load {hf} --use-kl-loss"),
    ("--ref-ckpt-step 3", "--ref-ckpt-step has no effect: --ref-load is not given", ""),
    ("--kl-loss-coef 0.1", "--kl-loss-coef has no effect", "--kl-loss-coef 0.1 --use-kl-loss --ref-load {hf}"),
    ("--kl-loss-type k2", "--kl-loss-type has no effect", "--kl-loss-type k2 --use-kl-loss --ref-load {hf}"),
    ("--tis-clip 3", "--tis-clip has no effect", "--tis-clip 3 --use-tis"),
    ("--opsm-delta 3", "--opsm-delta has no effect", "--opsm-delta 3 --use-opsm"),
    (
        "--gamma 0.9",
        "the estimator does not discount",
        "--gamma 1 --advantage-estimator reinforce_plus_plus --normalize-advantages",
    ),
    ("--max-tokens-per-gpu 64", "--max-tokens-per-gpu has no effect", PACKED),
    ("--micro-batch-size 2 " + PACKED, "--micro-batch-size has no effect", "--micro-batch-size 2"),
    ("--eps-clip 0.3 --loss-type sft_loss", "--eps-clip has no effect", "--eps-clip 0.3"),
    ("--rm-type random --custom-rm-path {dir}/mine.py:score", "--rm-type has no effect", "--rm-type random"),
    ("--rm-type random --rm-url http://x", "--rm-url has no effect", "--rm-type remote_rm --rm-url http://x"),
    ("--eval-prompt-data a {data}", "--eval-prompt-data has no effect: --eval-interval is not given", EVAL),
    ("--skip-eval-before-train", "--skip-eval-before-train has no effect", f"--skip-eval-before-train {EVAL}"),
    (f"--debug-train-only {EVAL}", "--eval-interval has no effect: no engines", EVAL),
    ("--num-epoch 9", "--num-epoch has no effect: --num-rollout wins", ""),
    ("--save {dir}/out", "--save has no effect: --save-interval is not given", "--save {dir}/out --save-interval 1"),
    ("--save-hf {dir}/hf_out", "--save-hf has no effect: --save-interval is not given", ""),
    ("--update-weight-disk-keep-files", "--update-weight-disk-keep-files has no effect", ""),
    ("--sequence-parallel", "--sequence-parallel has no effect", "--sequence-parallel --tensor-model-parallel-size 2"),
    ("--allgather-cp", "there is no context parallelism", "--allgather-cp --context-parallel-size 2"),
    ("--expert-tensor-parallel-size 2", "the model has no experts", "--expert-tensor-parallel-size 1"),
    ("--sglang-deepep-mode auto", "the engines do not use DeepEP", ""),
    (
        "--optimizer-offload-fraction 0.5",
        "--optimizer-offload-fraction has no effect",
        "--optimizer-offload-fraction 0.5 --optimizer-cpu-offload --use-precision-aware-optimizer",
    ),
    ("--tb-project-name x", "--use-tensorboard is not given", "--tb-project-name x --use-tensorboard"),
    ("--seq-length 9", "--seq-length has no effect", ""),
    ("--data-path x", "--data-path has no effect: it is read by Megatron's own loop", ""),
    ("--log-interval 7 --exit-interval 3", "--exit-interval has no effect", ""),
    (
        "--rm-type exact --label-key label",
        "--rm-type exact without --rollout-skip-special-tokens",
        "--rm-type exact --label-key label --rollout-skip-special-tokens",
    ),
    ("--advantage-estimator cispo", "no lower bound", "--advantage-estimator cispo --eps-clip 1"),
    ("--load nowhere", "--load nowhere holds no checkpoint", "--load nowhere --save nowhere --save-interval 1"),
    ("--save {ckpt} --save-interval 1", "holds checkpoints already", "--save {ckpt} --load {ckpt} --save-interval 1"),
    (
        "--save {dir}/o --save-interval 1 --save-hf {dir}/hf_out",
        "each export replaces the one before",
        "--save {dir}/o --save-interval 1 --save-hf {dir}/hf_out/{{rollout_id}}",
    ),
    ("--dsa-indexer-loss-coeff 0.5", "--dsa-indexer-loss-coeff has no effect: the model has no sparse attention", ""),
    ("--dsa-indexer-use-sparse-loss", "--dsa-indexer-use-sparse-loss has no effect", ""),
    (
        "--mtp-loss-scaling-factor 0.3",
        "--mtp-loss-scaling-factor has no effect: --enable-mtp-training is not given",
        "--mtp-loss-scaling-factor 0.3 --enable-mtp-training",
    ),
    ("--num-rollout 0", "nothing will be trained", ""),
    (
        f"{PACKED} --rollout-max-context-len 100",
        "a sample may have 100 tokens, more than the 64 of a micro-batch",
        f"{PACKED} --rollout-max-context-len 64",
    ),
    (
        f"{PACKED} --rollout-max-context-len 129 --context-parallel-size 2",
        "64 x --context-parallel-size 2 = 128",
        f"{PACKED} --rollout-max-context-len 128 --context-parallel-size 2",
    ),
    ("--rotary-base 10000", "--rotary-base 10000 trains another function of the weights", "--rotary-base 1000000"),
    ("--norm-epsilon 1e-5", "which read 1e-06 from config.json", "--norm-epsilon 1e-5 --debug-train-only"),
    ("--sglang-dtype bfloat16", "another precision than the trainer (float32)", "--sglang-dtype float32"),
    ("--sglang-context-length 300", "is above the model's 200 (config.json)", "--sglang-context-length 200"),
    ("--skip-eval-before-train --eval-interval 9 --eval-prompt-data a {data}", "only the last is evaluated", EVAL),
]
LARGE = [
    ("--tensor-model-parallel-size 16 --sequence-parallel", "16 reaches over nodes of 8 GPUs", "deepseek-v3", {}),
    ("--moe-aux-loss-coeff 0.01", "0.01 adds a load-balancing gradient", "qwen3-30B-A3B", {}),
    ("--moe-expert-capacity-factor 1", "drops tokens of crowded experts", "qwen3-30B-A3B", {}),
    ("--fp16", "trains a bfloat16 checkpoint", "qwen3-4B", {}),
    (
        "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 "
        "--sglang-speculative-num-draft-tokens 6",
        "a chain of 3 steps",
        "glm4.5-355B-A32B",
        {},
    ),
]


def tokens(case, text, ckpt="ckpt"):
    places = {
        "hf": case.hf,
        "data": case.directory / "train.jsonl",
        "dir": case.directory,
        "ckpt": case.directory / ckpt,
    }
    return [word.format(**places) for word in shlex.split(text)]


@pytest.fixture(autouse=True)
def files(case):
    case.megatron_checkpoint("ckpt")
    (case.directory / "mine.py").write_text("async def score(args, sample): ...")
    case.write_config(max_position_embeddings=200)


@pytest.mark.parametrize(("without_effect", "words", "with_effect"), CASES)
def test_rule(case, without_effect, words, with_effect):
    assert words in "\n".join(case.reading(*tokens(case, without_effect)).notices)
    assert words not in "\n".join(case.reading(*tokens(case, with_effect)).notices)


@pytest.mark.parametrize(("flags", "words", "model", "config"), LARGE)
def test_rule_of_large_models(case, flags, words, model, config):
    (case.hf / "config.json").write_text(json.dumps({**config_of(model), **config}))
    own = {flag: case.flags[flag] for flag in ("--hf-checkpoint", "--prompt-data", "--num-rollout")}
    own |= {"--rollout-batch-size": "8", "--rollout-max-response-len": "16", **MANY_GPUS}
    if "--fp16" in flags:
        del own["--bf16"]
    argv = [token for flag, value in own.items() for token in ((flag,) if value is None else (flag, value))]
    assert words not in "\n".join(read_args(argv, environ={}).notices)
    assert words in "\n".join(read_args([*argv, *shlex.split(flags)], environ={}).notices)


def test_warnings_come_in_one_block(case, caplog):
    case.args("--tis-clip", "3", "--seq-length", "9")
    (record,) = [record for record in caplog.records if "to look at again" in record.getMessage()]
    assert "--tis-clip" in record.getMessage() and "--seq-length" in record.getMessage()


def test_a_plain_run_is_quiet(case, caplog):
    case.args()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_rules_speak_of_flags_that_exist(case):
    """A rule about an attribute that was renamed would never speak again."""
    args = case.args()
    assert not [rule.dest for rule in RULES if not hasattr(args, rule.dest)]
    assert not [name for name in NUMERICS if not hasattr(args, name)]


def test_what_slime_reads_is_not_called_unused(case):
    """The pattern is about Megatron's loop: none of slime's own flags, and no fact of a model, may match it."""
    from slime.utils.arguments.groups import GROUPS
    from slime.utils.model_facts import megatron_args

    own = {flag.dest for group in GROUPS for flag in group.flags}
    facts = {flag[2:].replace("-", "_") for name in CONFIGS for flag in megatron_args(config_of(name))}
    assert not [dest for dest in own | facts if NOT_SLIMES_LOOP.match(dest)]
