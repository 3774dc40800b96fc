"""A tiny GLM-4 with experts and a multi-token-prediction layer through the whole loop: converted, served by SGLang,
trained together with its prediction layer, and trained on the same rollouts without."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.e2e import ROOT, Train, read_rows
from tests.helpers.mtp_reference import PREFIX, make_tiny_mtp_model
from tools.make_glm5_tiny import TINY, make_prompts, make_tokenizer

pytestmark = pytest.mark.e2e

STEPS = 2
MTP = ("--mtp-num-layers", "1")
TRAINED = ("--enable-mtp-training", "--mtp-loss-scaling-factor", "0.2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Hugging Face checkpoint with tokenizer, prompts beside it, and its conversion."""
    folder = tmp_path_factory.mktemp("glm4")
    path = make_tiny_mtp_model("glm4_moe", folder)
    make_tokenizer(TINY.config["vocab_size"]).save_pretrained(path)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_prompts(TINY, 1)))
    convert = [sys.executable, "tools/convert_hf_to_torch_dist.py", "--hf-checkpoint", str(path), *MTP]
    done = subprocess.run([*convert, "--save", str(folder / "torch_dist")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


def arguments(checkpoint, folder, *flags):
    words = f"""
        --hf-checkpoint {checkpoint} --load {checkpoint.parent}/torch_dist
        --prompt-data {checkpoint.parent}/prompts.jsonl
        --save {folder}/save --save-interval {STEPS} --no-save-optim --save-hf {folder}/final
        --metrics-jsonl {folder}/metrics.jsonl
        --actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --rollout-num-gpus-per-engine 1
        --colocate --no-offload-train --no-offload-rollout --fp32 --seed 7 --rollout-seed 7
        --input-key prompt --label-key label --custom-rm-path {ROOT}/examples/glm5_tiny/reward.py:reward_func
        --num-rollout {STEPS} --rollout-batch-size 4 --n-samples-per-prompt 4 --num-steps-per-rollout 1
        --rollout-max-response-len 12 --rollout-temperature 1.0
        --use-dynamic-batch-size --max-tokens-per-gpu 320 --advantage-estimator grpo
        --lr 2e-3 --lr-decay-style constant --weight-decay 0.0 --clip-grad 1.0
        --attention-dropout 0.0 --hidden-dropout 0.0
        --sglang-mem-fraction-static 0.3 --sglang-enable-deterministic-inference
    """
    return [*words.split(), *MTP, *flags]


@pytest.fixture(scope="module")
def served(checkpoint, tmp_path_factory):
    """(folder, rollouts) of a run with an engine, in which the prediction layer trains."""
    folder = tmp_path_factory.mktemp("served")
    dump = str(folder / "dump_{rollout_id}.pt")
    run = Train(arguments(checkpoint, folder, *TRAINED, "--save-debug-rollout-data", dump), folder / "output.txt")
    try:
        run.succeed()
    finally:
        run.kill_everything()
    return folder, dump


def replayed(served, checkpoint, folder, launches, *flags):
    """Metrics of training on the same rollouts without an engine."""
    replay = ("--debug-train-only", "--load-debug-rollout-data", served[1])
    launches.append(run := Train(arguments(checkpoint, folder, *replay, *flags), folder / "output.txt"))
    run.succeed()
    return read_rows(folder / "metrics.jsonl")


def weights(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_engine_and_trainer_agree_while_the_prediction_layer_trains(served):
    """The second rollout comes from pushed weights, whose names the engine took with the prediction layer's among
    them."""
    steps = read_rows(served[0] / "metrics.jsonl")
    assert list(steps) == list(range(STEPS))
    for row in steps.values():
        assert 0 < row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert 3 < row["train/mtp_loss"] == row["train/mtp_1_loss"] < 9 and row["train/mtp_grad_norm"] > 0
    samples = [torch.load(served[1].format(rollout_id=i), weights_only=True)["samples"] for i in range(STEPS)]
    assert [{v for sample in each for v in sample["weight_versions"]} for each in samples] == [{"1"}, {"2"}]


def test_the_exported_model_has_the_trained_layer(served, checkpoint):
    before, after = weights(checkpoint), weights(served[0] / "final")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert not [name for name in same if ".experts." not in name and "correction_bias" not in name]
    assert json.loads((served[0] / "final" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_frozen_it_stays_and_the_policy_is_the_same(served, checkpoint, tmp_path, launches):
    steps = replayed(served, checkpoint, tmp_path, launches)
    expected = read_rows(served[0] / "metrics.jsonl")
    for step, row in steps.items():
        assert not [name for name in row if "mtp" in name]
        assert row["train/loss"] == expected[step]["train/loss"]
        assert row["train/grad_norm"] == expected[step]["train/grad_norm"]
    before, trained, frozen = (weights(path) for path in (checkpoint, served[0] / "final", tmp_path / "final"))
    for name, tensor in frozen.items():
        assert torch.equal(tensor, (before if name.startswith(PREFIX) else trained)[name]), name
