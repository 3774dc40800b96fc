"""Rules of files, read and written: each once broken, its message, and once kept."""

import json

import pytest

from slime.utils.arguments.checks import files, outputs
from tests.helpers.rules import Rule, check_rule, each_rule, rule_name

RULES = {
    files.check_hf_checkpoint: (
        Rule("--hf-checkpoint nowhere --load {hf}", ("nowhere is not a directory",), kind="absent"),
        Rule("--hf-checkpoint {dir} --load {hf}", ("holds no config.json",), kind="absent"),
        Rule("", ("--hf-checkpoint: is not given",), "--hf-checkpoint {hf}", without=("--hf-checkpoint",)),
    ),
    files.check_prompt_data: (
        Rule("", ("--prompt-data: is not given",), "--prompt-data {data}", without=("--prompt-data",)),
        Rule(
            "--prompt-data nowhere.jsonl@[0:5]",
            ("nowhere.jsonl does not exist",),
            "--prompt-data {data}@[0:5]",
            kind="absent",
        ),
        Rule("--prompt-data {data}@[1,2]", ("[1,2] is no slice of rows",), "--prompt-data {data}@[-3:]"),
        Rule("--prompt-data {dir}/train.csv", ("must be a .jsonl or .parquet file",), "--prompt-data {data}"),
    ),
    files.check_eval_data: (
        Rule(
            "--eval-interval 5",
            ("5 asks for evaluations", "--eval-prompt-data heldout"),
            "--eval-interval 5 --eval-prompt-data held {data}",
            others=True,
        ),
        Rule(
            "--eval-prompt-data held nowhere.jsonl",
            ("held: nowhere.jsonl does not exist",),
            "--eval-prompt-data held {data}",
            kind="absent",
        ),
    ),
    files.check_reference: (
        Rule("--use-kl-loss", ("--ref-load: is not given, and --use-kl-loss",), "--use-kl-loss --ref-load {hf}"),
        Rule(
            "--ref-load nowhere",
            ("nowhere is neither a Megatron checkpoint",),
            "--ref-load {hf}",
            kind="absent",
            also="--use-kl-loss --load {hf}",
        ),
    ),
    files.check_checkpoint_directories: (
        Rule(
            "--load {dir}/ckpt/release",
            ("is a checkpoint inside a directory", "names: 7", "try: --load"),
            "--load {dir}/ckpt",
        ),
        Rule("--ref-load {dir}/alone/release", ("names: there is none",), "--ref-load {dir}/ckpt"),
    ),
    files.check_checkpoint_steps: (
        Rule(
            "--ckpt-step 3",
            ("3 is not in", "which has 7, 9", "try: --ckpt-step 9"),
            "--ckpt-step 7",
            kind="absent",
            also="--load {dir}/ckpt",
        ),
    ),
    files.check_same_model: (
        Rule(
            "--load {dir}/other",
            ("is another model: its hidden_size is 64, that of --hf-checkpoint is 48",),
            "--load {hf}",
        ),
    ),
    files.check_debug_data: (
        Rule(
            "--load-debug-rollout-data-subsample 1.5",
            ("is 1.5, must be within (0, 1]",),
            "--load-debug-rollout-data-subsample 0.5",
            also="--load-debug-rollout-data x{{rollout_id}}.pt",
        ),
        Rule(
            "--load-debug-rollout-data nowhere.pt",
            ("nowhere.pt does not exist",),
            "--load-debug-rollout-data {data}",
            kind="absent",
        ),
    ),
    outputs.check_saving: (
        Rule("--save-interval 2", ("2 asks for checkpoints",), "--save-interval 2 --save {dir}/out"),
        Rule(
            "--save {hf} --save-interval 1", ("is a Hugging Face checkpoint",), "--save {hf}_slime --save-interval 1"
        ),
        Rule(
            "--save {dir}/ckpt --save-interval 1",
            ("--save, --ref-load: both are",),
            "--save {dir}/new --save-interval 1",
            also="--use-kl-loss --ref-load {dir}/ckpt",
        ),
        Rule(
            "--save-retain-interval 3",
            ("3 is not a multiple of --save-interval 2",),
            "--save-retain-interval 4",
            also="--save {dir}/out --save-interval 2",
        ),
    ),
    outputs.check_templates: (
        Rule(
            "--save-hf out/{{step}}",
            ("out/{step} is no template", "known fields: {rollout_id}"),
            "--save-hf out/{{rollout_id}}",
            also="--save {dir}/out --save-interval 1",
        ),
        Rule(
            "--save-debug-rollout-data x.pt",
            ("x.pt lacks {rollout_id}", "try: --save-debug-rollout-data x_{rollout_id}.pt"),
            "--save-debug-rollout-data x_{{rollout_id}}.pt",
        ),
        Rule(
            "--save-debug-train-data x_{{rollout_id}}.pt",
            ("both are x_{rollout_id}.pt",),
            "--save-debug-train-data y_{{rollout_id}}_{{rank}}.pt",
            also="--save-debug-rollout-data x_{{rollout_id}}.pt",
        ),
    ),
    outputs.check_writable: (
        Rule(
            "--save {data}/ckpt --save-interval 1",
            ("train.jsonl is a file",),
            "--save {dir}/a/b/c --save-interval 1",
            kind="absent",
        ),
        Rule(
            "--metrics-jsonl /proc/none/metrics.jsonl",
            ("cannot be written by this user",),
            "--metrics-jsonl {dir}/logs/metrics.jsonl",
            kind="absent",
        ),
    ),
}


@pytest.fixture(autouse=True)
def checkpoints(case, monkeypatch):
    place = case.megatron_checkpoint("ckpt")
    for step in (7, 9):
        (case.directory / f"ckpt/iter_{step:07d}").mkdir()
    for parent in ("ckpt", "alone"):  # left over from a conversion; runs were saved beside the first since
        release = case.directory / parent / "release"
        release.mkdir(parents=True)
        for name in (".metadata", "metadata.json"):
            (release / name).touch()
    other = case.directory / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
    real = outputs.os.access
    # root may write anywhere: pretend to be somebody else where it matters
    monkeypatch.setattr(
        outputs.os, "access", lambda path, mode: not str(path).startswith("/proc") and real(path, mode)
    )
    return place


@pytest.mark.parametrize(("check", "rule"), each_rule(RULES), ids=rule_name)
def test_rule(case, check, rule):
    check_rule(case, check, rule)


def test_a_data_source_of_the_users_reads_what_it_likes(case):
    (case.directory / "mine.py").write_text("def source(args): ...")
    source = ("--data-source-path", f"{case.directory / 'mine.py'}:source")
    case.args(*source, prompt_data="hub:some/data")
    case.args(*source, without=("--prompt-data",))


def test_one_rollout_overwrites_nothing(case):
    case.args("--save-debug-rollout-data", "x.pt", num_rollout=1)
