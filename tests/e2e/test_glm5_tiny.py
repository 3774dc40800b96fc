"""Sparse attention with shared indices in real engines on the CPU, against transformers; then the whole loop of
scripts/run-glm5.2-tiny.sh. Sequences are several times longer than the number of chosen tokens."""

import base64
import io
import json
import os
import pickle
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.sglang_utils.server_process import SGLangServer
from slime.utils.engine_client import http_request
from tests.helpers.e2e import Launch, read_rows
from tests.helpers.engine_owner import engine_args
from tests.helpers.glm5_reference import reference_model
from tests.helpers.tiny_models import make_tiny_model
from tools import make_glm5_tiny

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-5  # float32 noise
TOPK = 16
# long prompts come in chunks, and of eight requests at once some wait for room
SMALL = {"max_total_tokens": 600, "chunked_prefill_size": 48, "log_level": "warning"}


class Engine:
    """A server, and the checkpoint whose weights it has."""

    def __init__(self, checkpoint: Path, log_dir: Path, rank: int, **fields: object) -> None:
        self.checkpoint = checkpoint
        args = engine_args(str(checkpoint), skip_tokenizer_init=True, **fields)
        self.server = SGLangServer(args, rank=rank, log_dir=log_dir, environ=os.environ)
        self.client = self.server.client

    def generate(self, input_ids: list[int], new: int, seed: int = 0, score_from: int = -1) -> dict:
        sampling = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        return json.loads(self._post("/generate", body | {"logprob_start_len": score_from}))

    def retract(self) -> None:
        """Takes all running requests out of the cache; their tokens are prefilled anew."""
        self._post("/pause_generation", {"mode": "retract"})
        self._post("/continue_generation", {})

    def _post(self, endpoint: str, body: dict) -> str:
        status, text = http_request("POST", f"{self.server.url}{endpoint}", body, timeout=120)
        assert status == 200, text
        return text


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """GLM-5.2 (shared indices, interleaved rotation; fixed blocks), DeepSeek-V3.2 (neither; blocks by the batch)."""
    folder = tmp_path_factory.mktemp("engines")
    make_glm5_tiny.main(["--out", str(folder / "glm"), "--mtp"])
    started = [Engine(folder / "glm" / "hf", folder, 0, enable_deterministic_inference=True, **SMALL)]
    try:
        v32 = make_tiny_model("deepseek_v32", folder)
        config = json.loads((v32 / "config.json").read_text())
        config |= {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        (v32 / "config.json").write_text(json.dumps(config))
        started.append(Engine(v32, folder, 1, **SMALL))
        for engine in started:
            engine.server.wait_ready(280)
        yield started
    finally:
        for engine in started:
            engine.server.stop()


def sampled(answer: dict) -> tuple[list[int], list[float]]:
    """(token ids, log-probs) of one answer."""
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def table(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """log softmax of the model's logits, [len(tokens), vocabulary]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)


def gap(model: torch.nn.Module, prompt: list[int], answer: dict) -> float:
    """The largest difference of an answer's log-probs, prompt (if scored) and response, from the model's."""
    output, log_probs = sampled(answer)
    told = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
    tokens = prompt + output
    expected = table(model, tokens)[range(len(tokens) - 1), tokens[1:]]
    told = torch.tensor([*told[1:], *log_probs])  # the first token has no log-prob
    return (told - expected[len(expected) - len(told) :]).abs().max().item()


def assert_agree(gaps: list[float]) -> None:
    """All but one within the noise. Once in some 10,000 choices two scores are so close that rounding decides, which
    changes what follows in that answer by some 0.01; wrong choices change all answers by some 0.5."""
    *others, worst = sorted(gaps)
    assert max(others) < TOLERANCE and worst < 0.3, gaps


def prompts(count: int, lengths: tuple[int, ...], vocabulary: int = 249) -> list[list[int]]:
    """249: SGLang reports the last id of a vocabulary as 0."""
    draw = random.Random(count)
    return [[draw.randrange(3, vocabulary) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


@pytest.fixture(scope="module")
def references(engines):
    return [reference_model(engine.checkpoint).eval() for engine in engines]


def test_log_probs_equal_transformers(engines, references):
    """Prompts scored as a whole and in chunks, and decoding, alone and in a batch that is retracted on its way."""
    for engine, model in zip(engines, references, strict=True):
        jobs = prompts(8, (5, 21, 60, 120))
        assert_agree([gap(model, prompt, engine.generate(prompt, 4, score_from=0)) for prompt in jobs[:4]])
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(engine.generate, job, 64) for job in jobs]
            time.sleep(0.4)
            engine.retract()
            answers = [future.result() for future in running]
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        assert_agree([gap(model, prompt, answer) for prompt, answer in zip(jobs, answers, strict=True)])


def test_the_reference_tells_wrong_choices_apart(engines, references):
    """Attending to everything is the same for the first index_topk tokens, and far beyond the tolerance after them."""
    model = references[0]
    (prompt,) = prompts(1, (120,))
    right = table(model, prompt)
    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    for indexer in indexers:
        indexer.index_topk = 1000
    assert (table(model, prompt) - right)[:TOPK].abs().max() < TOLERANCE
    assert (table(model, prompt) - right)[TOPK:].abs().mean() > 0.1
    for indexer in indexers:
        indexer.index_topk = TOPK
    assert torch.equal(table(model, prompt), right)


def test_cached_tokens_keep_their_index_keys(engines, references):
    """A second turn finds prefill and decoded tokens in the cache: the bits of a fresh prefill, chosen among them."""
    engine, model = engines[0], references[0]
    (prompt,) = prompts(1, (50,))
    first = engine.generate(prompt, 30, seed=5)
    longer = prompt + first["output_ids"] + [7, 8, 9]
    warm = engine.generate(longer, 20, seed=6)
    assert warm["meta_info"]["cached_tokens"] > 4 * TOPK
    engine.client.flush_cache()
    cold = engine.generate(longer, 20, seed=6)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert sampled(warm) == sampled(cold)
    assert_agree([gap(model, prompt, first), gap(model, longer, warm)])


def test_changed_indexers_arrive_by_name(engines, references, tmp_path):
    """Weights of indexers alone are pushed; the engine then chooses as transformers does with them."""
    engine = engines[0]
    shutil.copytree(engine.checkpoint, tmp_path / "new")
    weights = load_file(tmp_path / "new" / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    changed = {name: weight for name, weight in weights.items() if ".indexer." in name}
    changed = {name: weight + 0.1 * torch.randn(weight.shape, generator=generator) for name, weight in changed.items()}
    save_file(weights | changed, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})

    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=4).dump(list(changed.items()))
    engine.client.flush_cache()
    engine.client.update_weights_from_tensor([base64.b64encode(buffer.getvalue()).decode()], weight_version=1)
    new = reference_model(tmp_path / "new").eval()
    jobs = prompts(3, (40, 110))
    answers = [engine.generate(prompt, 20, score_from=0) for prompt in jobs]
    assert min(gap(references[0], prompt, answer) for prompt, answer in zip(jobs, answers, strict=True)) > 0.1
    assert_agree([gap(new, prompt, answer) for prompt, answer in zip(jobs, answers, strict=True)])


def test_from_random_weights_to_trained_ones(tmp_path):
    """Engine and trainer agree in every step on sequences beyond index_topk. The engine starts from other weights than
    the trainer: what it generates with, indexers included, came by the weight push."""
    out, other = tmp_path / "run", tmp_path / "other"
    make_glm5_tiny.main(["--out", str(other), "--seed", "99"])
    dump = str(tmp_path / "dump_{rollout_id}.pt")
    flags = ("--hf-checkpoint", str(other / "hf"), "--save-debug-rollout-data", dump)
    command = ["bash", "scripts/run-glm5.2-tiny.sh", *flags]
    launch = Launch(command, tmp_path / "output.txt", {"OUT": str(out), "NUM_ROLLOUT": "2"})
    try:
        assert launch.end(280) == 0, launch.tail()
        launch.assert_nothing_remains()
    finally:
        launch.kill_everything()

    steps = read_rows(out / "metrics.jsonl")
    assert list(steps) == [0, 1]
    for step, row in steps.items():
        # one choice in some 10,000 is decided by rounding, which the mean shows as some 3e-5
        assert 0 < row["train/train_rollout_logprob_abs_diff"] < 1e-4, launch.tail()
        assert row["train/grad_norm"] > 0
        samples = torch.load(dump.format(rollout_id=step), weights_only=True)["samples"]
        assert len(samples) == 64 and min(len(sample["tokens"]) for sample in samples) > TOPK
        assert {version for sample in samples for version in sample["weight_versions"]} == {str(step + 1)}
        for sample in samples:
            below = sum(token < 125 for token in sample["tokens"][-sample["response_length"] :])
            assert sample["reward"] == below / sample["response_length"]

    (final,) = (out / "final").glob("*.safetensors")
    start, end = load_file(out / "hf" / "model.safetensors"), load_file(final)
    assert start.keys() == end.keys()
    same = {name for name in start if torch.equal(start[name], end[name])}
    assert not [name for name in same if "indexer" not in name and "e_score_correction_bias" not in name]


def test_a_dry_run_writes_nothing(tmp_path):
    for shape, gpus in (("tiny", "2"), ("h200", "1")):
        environ = {"DRY_RUN": "1", "OUT": str(tmp_path / "out"), "SHAPE": shape, "GPUS": gpus}
        launch = Launch(["bash", "scripts/run-glm5.2-tiny.sh"], tmp_path / "plan.txt", environ)
        assert launch.end(60) == 0 and "verdict: starts" in launch.text(), launch.tail()
    assert not (tmp_path / "out").exists()
