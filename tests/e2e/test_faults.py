"""Bad input and faults on the command line: a message that names the thing, an exit code that is not 0, no process and
no half-written checkpoint left."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.helpers.e2e import Train, assert_nothing_half_written, assert_whole_checkpoint, read_rows, without
from tests.helpers.faults import BAD_INDEX

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Failed:
    """A run that ended with exit code 1 and left no process. block: the error it showed."""

    run: Train
    block: str


@pytest.fixture(scope="module")
def sft(quickstart):
    """Arguments of a small SFT run without engines: two rollouts of two steps."""
    arguments = without(quickstart.sft, "--save", "--save-hf", "--save-interval", "--metrics-jsonl")
    return [*arguments, "--num-rollout", "2", "--rollout-batch-size", "128"]


@pytest.fixture(scope="module")
def grpo(quickstart):
    """Arguments of the quickstart's GRPO run, without its outputs."""
    outputs = ("--save", "--save-hf", "--save-interval", "--metrics-jsonl", "--save-debug-rollout-data")
    return without(quickstart.grpo, *outputs, "--eval-interval", "--eval-prompt-data", "--n-samples-per-eval-prompt")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt-data", "no/such/file.jsonl"), "--prompt-data: no/such/file.jsonl does not exist"),
        (("--rollout-bach-size", "3"), "--rollout-bach-size: unknown flag; the nearest known: --rollout-batch-size,"),
        (("--custom-rm-path", "no_such.rewards.score"), "--custom-rm-path: no_such.rewards.score: No module named"),
        (("--rollout-function-path", "tests.helpers.faults.no_such_name"), "has no 'no_such_name'"),
        (("--rollout-function-path", "{folder}/broken.py:generate"), "broken.py:1: "),
    ],
    ids=["no file", "no flag", "no module", "no name", "broken module"],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(sft, tmp_path, flags, message):
    (tmp_path / "broken.py").write_text("def generate(:\n")
    flags = [flag.format(folder=tmp_path) for flag in flags]
    run = Train([*sft, *flags, "--save", str(tmp_path / "save")], tmp_path / "output.txt")
    assert run.end(30) == 2
    assert message in run.text() and "Traceback" not in run.text()
    assert not (tmp_path / "save").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def failed(quickstart, sft, grpo, folder):
    """Name -> what became of it. The runs take place in the background, two at a time, in this order."""
    rows = (quickstart.folder / "sft.jsonl").read_text().splitlines()
    (folder / "empty.jsonl").write_text("")
    (folder / "malformed.jsonl").write_text("\n".join([*rows[:50], rows[50][:30], *rows[51:300], "7"]))
    faults = "tests.helpers.faults"
    cases = {
        "empty": [*sft, "--prompt-data", str(folder / "empty.jsonl")],
        "malformed": [*sft, "--prompt-data", str(folder / "malformed.jsonl")],
        "engine": [*grpo, "--debug-rollout-only", "--sglang-tokenizer-path", str(folder / "no_tokenizer")],
        "loss": [
            *(*sft, "--prompt-data", str(folder / "malformed.jsonl"), "--skip-malformed-rows", "--save-interval", "1"),
            *("--loss-type", "custom_loss", "--custom-loss-function-path", f"{faults}.nan_loss"),
        ],
        "reward": [
            *(*grpo, "--debug-rollout-only", "--custom-rm-path", f"{faults}.nan_reward"),
            *("--save-debug-rollout-data", str(folder / "reward_{rollout_id}.pt")),
        ],
    }

    def run(name: str, save: Path) -> Failed:
        launch = Train([*cases[name], "--save", str(save)], folder / f"{name}.txt")
        try:
            block = launch.fail()
        finally:
            launch.kill_everything()
        assert_nothing_half_written(save)
        return Failed(launch, block)

    with ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(run, name, folder / f"{name}_save") for name in cases}
        yield lambda name: futures[name].result()
        pool.shutdown(cancel_futures=True)


def test_an_empty_file_is_named(failed, folder):
    assert failed("empty").block.startswith(f"error: {folder / 'empty.jsonl'}: no prompt is left: 0 rows")


def test_a_malformed_row_is_named_with_its_line(failed, folder):
    block = failed("malformed").block
    assert block.startswith(f"error: {folder / 'malformed.jsonl'}:51: malformed row: ")
    assert "--skip-malformed-rows" in block


def test_nan_loss_names_its_step(failed, folder):
    """On data with malformed rows that are skipped, and counted; what was saved before stays usable."""
    loss = failed("loss")
    assert re.match(r"error: loss nan in rollout 1 step 1, micro-batch of samples \[", loss.block), loss.block
    assert "malformed.jsonl: skipped 2 malformed rows" in loss.run.text()
    assert_whole_checkpoint(folder / "loss_save", 0)


def test_an_engine_that_dies_at_its_start_has_the_last_word(failed):
    block = failed("engine").block
    assert re.match(r"error: SGLang engine 0 .* ended with status [1-9].*sglang_engine_0_node_0\.log", block), block
    assert "no_tokenizer" in block


def test_nan_reward_names_its_sample(failed, folder, quickstart):
    """Only generating: the first rollout is that of the quickstart, token for token; the second has the bad reward."""
    block = failed("reward").block
    assert re.match(rf"error: sample index={BAD_INDEX} .*finite number, got float 'nan'", block), block
    assert "generate rollout 1" in block
    dumps = str(folder / "reward_{rollout_id}.pt"), quickstart.dump
    mine, theirs = (torch.load(dump.format(rollout_id=0), weights_only=True)["samples"] for dump in dumps)
    for key in ("index", "prompt", "tokens", "rollout_log_probs"):
        assert [sample[key] for sample in mine] == [sample[key] for sample in theirs], key
    assert all(sample["reward"] == sample["response_length"] for sample in mine)


def test_ctrl_c_while_training(sft, tmp_path, launches):
    flags = ["--save", str(tmp_path / "save"), "--save-interval", "1", "--rollout-batch-size", "2560"]
    launches.append(run := Train([*sft, *flags, "--metrics-jsonl", str(tmp_path / "metrics.jsonl")], tmp_path / "out"))
    run.wait_for("step 1/2: ")
    run.press_ctrl_c()
    assert run.end(60) == 130, run.tail()
    run.assert_nothing_remains()
    assert "Traceback" not in run.text()[run.text().index("stopping ...") :]
    assert_whole_checkpoint(tmp_path / "save", 0)
    assert list(read_rows(tmp_path / "metrics.jsonl")) == [0]


def test_ctrl_c_while_engine_and_trainer_start(grpo, tmp_path, launches):
    launches.append(run := Train([*grpo, "--save", str(tmp_path / "save")], tmp_path / "output.txt"))
    run.wait_for("started SGLang engine 0")
    run.press_ctrl_c()
    assert run.end(60) == 130, run.tail()
    run.assert_nothing_remains()
    assert "Traceback" not in run.text()[run.text().index("stopping ...") :]
    assert_nothing_half_written(tmp_path / "save")
