"""Flags without effect are collected in one warning; flags with effect are not mentioned."""

import pytest

DATA = "{data}"
# tokens where the flag has no effect, the words of the warning, tokens where it has one
RULES = [
    (("--ref-load", "{hf}", "--load", "{ckpt}"), "--ref-load has no effect", ("--ref-load", "{hf}", "--use-kl-loss")),
    (
        ("--kl-loss-coef", "0.1"),
        "--kl-loss-coef has no effect",
        ("--kl-loss-coef", "0.1", "--use-kl-loss", "--ref-load", "{hf}"),
    ),
    (("--tis-clip", "3"), "--tis-clip has no effect", ("--tis-clip", "3", "--use-tis")),
    (("--opsm-delta", "3"), "--opsm-delta has no effect", ("--opsm-delta", "3", "--use-opsm")),
    (
        ("--max-tokens-per-gpu", "9"),
        "--max-tokens-per-gpu has no effect",
        ("--max-tokens-per-gpu", "9", "--use-dynamic-batch-size"),
    ),
    (("--num-epoch", "9"), "--num-epoch has no effect: --num-rollout wins", ()),
    (("--seq-length", "9"), "--seq-length has no effect", ()),
    (
        ("--rm-type", "exact"),
        "--rm-type exact without --rollout-skip-special-tokens",
        ("--rm-type", "exact", "--rollout-skip-special-tokens"),
    ),
    (("--advantage-estimator", "cispo"), "no lower bound", ("--advantage-estimator", "cispo", "--eps-clip", "1")),
    (("--load", "nowhere"), "--load nowhere holds no checkpoint", ("--load", "nowhere", "--save", "nowhere")),
    (("--num-rollout", "0"), "nothing will be trained", ()),
    (
        ("--debug-train-only", "--eval-interval", "2", "--eval-prompt-data", "a", "{data}"),
        "--eval-interval has no effect: no engines",
        ("--eval-interval", "2", "--eval-prompt-data", "a", "{data}"),
    ),
]


@pytest.mark.parametrize(("without_effect", "words", "with_effect"), RULES)
def test_rule(case, caplog, without_effect, words, with_effect):
    places = {"hf": case.hf, "data": case.directory / "train.jsonl", "ckpt": case.megatron_checkpoint("ckpt")}
    case.args(*(token.format(**places) for token in without_effect))
    assert words in caplog.text
    caplog.clear()
    case.args(*(token.format(**places) for token in with_effect))
    assert words not in caplog.text


def test_warnings_come_in_one_block(case, caplog):
    case.args("--tis-clip", "3", "--seq-length", "9")
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "--tis-clip" in record.getMessage() and "--seq-length" in record.getMessage()


def test_a_plain_run_is_quiet(case, caplog):
    case.args()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
