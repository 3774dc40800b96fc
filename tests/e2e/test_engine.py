"""One real SGLang server on the CPU, behind a real router, in deterministic mode. Later tests rely on earlier ones'
server: weights are changed and, at the very end, the owner is killed."""

import base64
import io
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.update_weight.process_group import join_group
from slime.backends.sglang_utils.ports import PortInUseError
from slime.backends.sglang_utils.server_process import SGLangServer
from slime.utils.engine_client import EngineClient, EngineError, http_request
from tests.helpers.engine_owner import engine_args
from tests.helpers.tiny_models import VOCAB, make_tiny_model

pytestmark = pytest.mark.e2e

REPO = Path(__file__).parents[2]
TOLERANCE = 1e-5


class Engine:
    """The owner process, the urls, and the checkpoint whose weights the server has."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint = make_tiny_model("qwen3", directory)
        self.log = directory / "logs" / "sglang_engine_0_node_0.log"
        self.owner = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.engine_owner", str(self.checkpoint), str(directory / "logs")],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.supervisors = json.loads(self.owner.stdout.readline())["supervisors"]
        line = self.owner.stdout.readline()
        assert line, "the server did not start: " + self.log.read_text()
        urls = json.loads(line)
        self.server, self.router = urls["server"], urls["router"]
        self.client = EngineClient(self.server)

    def generate(self, input_ids, seed=0, new=12, url=None, **params):
        """One request, or several when input_ids is a list of lists (seed then is a list too)."""
        sampling = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True, **params}
        many = isinstance(input_ids[0], list)
        seeds = seed if many else [seed]
        seeded = [sampling | {"sampling_seed": s} for s in seeds]
        body = {"input_ids": input_ids, "sampling_params": seeded if many else seeded[0], "return_logprob": True}
        status, text = http_request("POST", f"{url or self.server}/generate", body, timeout=300)
        assert status == 200, text
        return json.loads(text)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    if engine.owner.poll() is None:
        engine.owner.communicate(timeout=60)


def sampled(answer):
    """(token ids, log-probs) of one answer."""
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def reference_log_probs(checkpoint, prompt, output):
    """log softmax of transformers' logits, float32, at the output tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0]
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(output)[:, None]).view(-1).tolist()


def assert_serves(engine, checkpoint, prompt=(11, 12, 13, 14, 15)):
    output, log_probs = sampled(engine.generate(list(prompt), seed=3, new=24))
    expected = reference_log_probs(checkpoint, list(prompt), output)
    assert max(abs(a - b) for a, b in zip(log_probs, expected, strict=True)) < TOLERANCE


def perturbed(checkpoint, directory, seed):
    """A copy of the checkpoint with other weights, and these weights by their name on disk."""
    from safetensors.torch import load_file, save_file

    directory.mkdir()
    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(checkpoint / "model.safetensors")
    weights = {name: w + 0.05 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return weights


def test_server_describes_itself(engine):
    engine.client.health()
    assert engine.client.weight_version() == "default"
    assert engine.client.model_info()["model_path"] == str(engine.checkpoint)
    info = engine.client.server_info()
    assert (info["device"], info["attention_backend"], info["sampling_backend"]) == ("cpu", "torch_native", "pytorch")
    assert info["disable_radix_cache"] is False
    assert "Freezing GC in Scheduler" in engine.log.read_text()  # a flush would take half a second otherwise


def test_log_probs_equal_transformers(engine):
    assert_serves(engine, engine.checkpoint)
    assert_serves(engine, engine.checkpoint, prompt=tuple(range(3, 200)))


def test_samples_do_not_depend_on_arrival_or_batch(engine):
    """96 ragged requests: all at once, shuffled, in lists, one by one, through the router, with a cold and a warm
    prefix cache: the same tokens and the same bits of every log-prob."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.choice((1, 5, 6, 17, 40)))] for _ in range(24)]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    jobs = list(range(len(prompts)))

    def at_once(order, url=None):
        with ThreadPoolExecutor(32) as pool:
            answers = pool.map(lambda i: sampled(engine.generate(prompts[i], seed=1000 + i, url=url)), order)
            return dict(zip(order, answers, strict=True))

    expected = at_once(jobs)
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(jobs)
    shuffled = draw.sample(jobs, len(jobs))
    assert at_once(shuffled) == expected
    assert at_once(shuffled, url=engine.router) == expected
    engine.client.flush_cache()
    for start in range(0, len(jobs), 8):
        group = jobs[start : start + 8]
        answers = engine.generate([prompts[i] for i in group], seed=[1000 + i for i in group])
        assert [sampled(answer) for answer in answers] == [expected[i] for i in group]
    engine.client.flush_cache()
    for i in jobs[::5]:
        assert sampled(engine.generate(prompts[i], seed=1000 + i)) == expected[i]


def test_one_seed_gives_each_entry_of_a_list_its_own(engine):
    """Equal prompts in one request with one seed, through the router: entry i draws as if alone with seed + i."""
    body = {
        "input_ids": [[8, 9, 10]] * 6,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 50},
        "return_logprob": True,
    }
    status, text = http_request("POST", f"{engine.router}/generate", body, timeout=300)
    assert status == 200, text
    together = [sampled(answer) for answer in json.loads(text)]
    assert together == [sampled(engine.generate([8, 9, 10], seed=50 + i)) for i in range(6)]
    assert len({tuple(tokens) for tokens, _ in together}) == 6


def test_filtered_sampling_is_seeded_too(engine):
    prompts = [[5, 6, 7 + i] for i in range(8)]
    together = engine.generate(prompts, seed=list(range(8)), top_p=0.8, top_k=20)
    for i, answer in enumerate(together):
        assert sampled(engine.generate(prompts[i], seed=i, top_p=0.8, top_k=20)) == sampled(answer)


def test_cached_decoded_tokens_give_the_bits_of_a_fresh_prefill(engine):
    """A second turn finds its prefix in the cache, written by decoding; without the cache it is prefilled."""
    first = engine.generate([20, 21, 22], seed=9, new=40)
    prompt = [20, 21, 22, *first["output_ids"], 30, 31]
    warm = engine.generate(prompt, seed=10)
    assert warm["meta_info"]["cached_tokens"] > 30
    engine.client.flush_cache()
    cold = engine.generate(prompt, seed=10)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert sampled(warm) == sampled(cold)


def test_paused_generation_waits_and_abort_returns_what_there_is(engine):
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(engine.generate, [40, 41], new=450)
        time.sleep(0.5)
        engine.client.pause_generation()
        answer = long.result(timeout=60)
        assert answer["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        waiting = pool.submit(engine.generate, [42, 43], new=2)
        time.sleep(0.5)
        assert not waiting.done()
        engine.client.continue_generation()
        assert len(waiting.result(timeout=60)["output_ids"]) == 2
        long = pool.submit(engine.generate, [44, 45], new=450)
        time.sleep(0.5)
        engine.client.abort_all()
        assert len(long.result(timeout=60)["output_ids"]) <= 450


def test_weights_by_value(engine, tmp_path):
    """Plain pickle, base64: no shared memory between trainer and server."""
    before = engine.client.weights_checksum()
    weights = perturbed(engine.checkpoint, tmp_path / "new", seed=1)
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=4).dump(list(weights.items()))
    engine.client.pause_generation()
    engine.client.flush_cache()
    engine.client.update_weights_from_tensor([base64.b64encode(buffer.getvalue()).decode()], weight_version=1)
    engine.client.continue_generation()
    assert engine.client.weight_version() == "1"
    assert engine.generate([1, 2])["meta_info"]["weight_version"] == "1"
    after = engine.client.weights_checksum()
    assert len(after["ranks"]) == 1 and after["per_engine_checksum"] != before["per_engine_checksum"]
    assert_serves(engine, tmp_path / "new")


def test_weights_from_disk(engine, tmp_path):
    perturbed(engine.checkpoint, tmp_path / "new", seed=2)
    engine.client.update_weights_from_disk(tmp_path / "new", weight_version=2)
    assert engine.client.weight_version() == "2"
    assert_serves(engine, tmp_path / "new")
    with pytest.raises(EngineError, match="/update_weights_from_disk answered HTTP 400"):
        engine.client.update_weights_from_disk("/no/such/dir", weight_version=3)
    engine.client.health()
    assert engine.client.weight_version() == "2"


def test_weights_by_broadcast(engine, tmp_path):
    weights = perturbed(engine.checkpoint, tmp_path / "new", seed=3)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meta = [list(weights), [str(w.dtype) for w in weights.values()], [list(w.shape) for w in weights.values()]]
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(engine.client.init_weights_update_group, "127.0.0.1", port, 1, 2, "push", "gloo")
        group = join_group("gloo", "127.0.0.1", port, 2, "push", timeout=60)
        joining.result(timeout=60)
        engine.client.pause_generation()
        engine.client.flush_cache()
        receiving = pool.submit(engine.client.update_weights_from_distributed, *meta, "push", weight_version=4)
        for weight in weights.values():
            torch.distributed.broadcast(weight.contiguous(), 0, group=group)
        receiving.result(timeout=60)
        engine.client.continue_generation()
    assert engine.client.weight_version() == "4"
    assert_serves(engine, tmp_path / "new")
    engine.client.destroy_weights_update_group("push")
    with pytest.raises(EngineError, match="/destroy_weights_update_group answered HTTP 400"):
        engine.client.destroy_weights_update_group("push")


def test_a_taken_port_is_refused_at_once(engine, tmp_path):
    port = int(engine.server.rpartition(":")[2])
    start = time.monotonic()
    with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
        SGLangServer(engine_args(str(engine.checkpoint)), rank=1, log_dir=tmp_path, environ={}, port=port)
    assert time.monotonic() - start < 2


def test_wrong_flags_fail_with_the_servers_own_words(engine, tmp_path):
    args = engine_args(str(engine.checkpoint), attention_backend="no_such_backend")
    server = SGLangServer(args, rank=1, log_dir=tmp_path, environ=os.environ)
    try:
        with pytest.raises(EngineError, match=r"(?s)SGLang engine 1 .*ended with status 2.*log.*no_such_backend"):
            server.wait_ready(200)
    finally:
        server.stop()


def descendants(pid):
    """pid -> name of every living process below."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if state != "Z":
            children.setdefault(int(parent), {})[int(stat.parent.name)] = text[text.index("(") + 1 : text.rindex(")")]
    found, queue = {}, [pid]
    while queue:
        below = children.get(queue.pop(), {})
        found |= below
        queue += below
    return found


def test_killed_owner_leaves_no_process(engine):
    """kill -9 of the owner: supervisor, server, scheduler, detokenizer and router are all gone within 15 s."""
    everybody = descendants(engine.owner.pid)
    assert {"sglang::schedul", "sglang::detoken"} <= set(everybody.values())
    assert set(engine.supervisors) <= everybody.keys()
    os.kill(engine.owner.pid, signal.SIGKILL)
    engine.owner.wait()
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in everybody):
        time.sleep(0.1)
    assert {pid: name for pid, name in everybody.items() if Path(f"/proc/{pid}").exists()} == {}
