"""What one run of scripts/run-quickstart.sh leaves: metrics, samples, plot, checkpoints; and that its rollouts can be
trained again with the same numbers."""

import subprocess
import sys

import pytest
import torch

from tests.helpers.e2e import ROOT, Train, assert_whole_checkpoint, numbers, read_rows, without

pytestmark = pytest.mark.e2e

STEP_KEYS = {
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "train/loss",
    "train/pg_loss",
    "train/entropy_loss",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff",
    "perf/generate_time",
    "perf/train_time",
    "perf/sync_time",
    "perf/tokens_per_gpu_per_sec",
}


def test_every_step_is_in_the_metrics(quickstart):
    warm_up = read_rows(quickstart.folder / "sft-metrics.jsonl")
    assert list(warm_up) == list(range(8)) and warm_up[7]["train/loss"] < warm_up[0]["train/loss"] - 0.5
    steps = read_rows(quickstart.folder / "metrics.jsonl")
    assert list(steps) == [0, 1, 2]
    for row in steps.values():
        assert row.keys() >= STEP_KEYS
        assert 0 < row["train/grad_norm"] < 100
    evaluations = read_rows(quickstart.folder / "metrics.jsonl", "eval/step")
    assert list(evaluations) == [0, 3]
    assert all(0 <= row["eval/heldout"] <= 1 for row in evaluations.values())


def test_the_trainer_finds_the_log_probs_of_the_engine(quickstart):
    for row in read_rows(quickstart.folder / "metrics.jsonl").values():
        assert 0 < row["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_samples_come_from_the_weights_of_their_step(quickstart):
    versions = []
    for rollout_id in range(3):
        dump = torch.load(quickstart.dump.format(rollout_id=rollout_id), weights_only=True)
        assert dump["rollout_id"] == rollout_id and len(dump["samples"]) == 64 * 8
        assert [sample["index"] for sample in dump["samples"]] == list(range(512 * rollout_id, 512 * (rollout_id + 1)))
        versions.append({version for sample in dump["samples"] for version in sample["weight_versions"]})
    assert versions == [{"1"}, {"2"}, {"3"}]


def test_rewards_are_those_of_the_answers(quickstart):
    dump = torch.load(quickstart.dump.format(rollout_id=2), weights_only=True)
    right = [sample for sample in dump["samples"] if sample["reward"]]
    assert all((sample["response"] == sample["label"]) == bool(sample["reward"]) for sample in dump["samples"])
    mean = read_rows(quickstart.folder / "metrics.jsonl")[2]["rollout/raw_reward"]
    assert 0 < len(right) / 512 == mean


def test_the_plot_is_a_picture(quickstart):
    from PIL import Image

    with Image.open(quickstart.folder / "curves.png") as image:
        image.load()
        assert image.format == "PNG" and min(image.size) > 500
        assert len(image.convert("L").resize((150, 75)).getcolors()) > 10


def test_the_output_tells_what_happened(quickstart):
    text = quickstart.launch.text()
    for expected in ("step 3/3: reward", "eval after 3 rollouts: heldout", "run summary", "Talk to it:", "curves.png"):
        assert expected in text
    assert "Traceback" not in text


def test_the_trained_model_is_a_hugging_face_checkpoint(quickstart):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = load_file(quickstart.folder / "sft-hf" / "model-00001-of-00001.safetensors")
    model = AutoModelForCausalLM.from_pretrained(quickstart.folder / "final", dtype="auto")
    after = model.state_dict()
    assert before.keys() == after.keys() and all(weight.dtype == torch.float32 for weight in after.values())
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert not same
    tokenizer = AutoTokenizer.from_pretrained(quickstart.folder / "final")
    assert tokenizer.decode(tokenizer("37+58=")["input_ids"]) == "37+58="
    assert_whole_checkpoint(quickstart.folder / "grpo", 2)
    assert_whole_checkpoint(quickstart.folder / "sft", 7)


def test_one_can_talk_to_it(quickstart):
    command = [sys.executable, "tools/chat.py", str(quickstart.folder / "final"), "--prompt", "37+58="]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def test_killed_after_a_save_it_continues_with_the_same_numbers(quickstart, tmp_path, launches):
    """Trained again without engines, the rollouts read from the dump: the numbers of the whole run, to the last bit,
    although the run is killed after the second step and another one goes on from its checkpoint."""
    expected = read_rows(quickstart.folder / "metrics.jsonl")
    arguments = without(quickstart.grpo, "--save-debug-rollout-data", "--save-hf", "--eval-interval")
    arguments += ["--debug-train-only", "--load-debug-rollout-data", quickstart.dump]
    save = ["--save", str(tmp_path / "save"), "--save-interval", "1", "--metrics-jsonl"]
    killed = Train([*arguments, *save, str(tmp_path / "before.jsonl")], tmp_path / "killed.txt")
    launches.append(killed)
    killed.wait_for(r"step 2/3: ")
    killed.process.kill()
    killed.end()
    assert_whole_checkpoint(tmp_path / "save", 1)
    resumed = [*arguments, *save, str(tmp_path / "after.jsonl"), "--load", str(tmp_path / "save")]
    launches.append(again := Train(resumed, tmp_path / "resumed.txt"))
    again.succeed()
    before, after = read_rows(tmp_path / "before.jsonl"), read_rows(tmp_path / "after.jsonl")
    assert set(before) >= {0, 1} and list(after) == [2]
    for step, row in (*before.items(), *after.items()):
        assert numbers(row, "train") == numbers(expected[step], "train"), step
    assert_whole_checkpoint(tmp_path / "save", 2)
