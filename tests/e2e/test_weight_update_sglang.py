"""A real SGLang server takes Megatron's weights through every transport and then speaks as transformers does."""

import contextlib
import os
from argparse import Namespace

import pytest

from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_megatron import Layout
from tests.helpers.tiny_models import make_tiny_model

pytestmark = pytest.mark.e2e

PROMPT = [11, 12, 13, 14, 15]
TRANSPORTS = {
    "tensor": {"colocate": True},
    "distributed": {"colocate": False},
    "disk": {"update_weight_transport": "disk"},
}


@contextlib.contextmanager
def _server(model, log_dir):
    """A running SGLang server of the model."""
    from slime.backends.sglang_utils.server_process import SGLangServer

    args = Namespace(
        accelerator="cpu",
        hf_checkpoint=str(model),
        sglang_overrides={"dtype": "float32", "mem_fraction_static": 0.1, "max_total_tokens": 4096},
        rollout_num_gpus_per_engine=1,
        num_gpus_per_node=1,
        seed=1,
        offload_rollout=False,
        fp16=False,
        bf16=False,
    )
    server = SGLangServer(args, rank=0, log_dir=log_dir, environ=os.environ)
    try:
        server.wait_ready(300)
        yield server
    finally:
        server.stop()


def _push(rank, world_size, weights, url, directory, flags):
    from tests.helpers.tiny_megatron import load, make_args, start

    start(Layout(pp=world_size))
    from slime.backends.megatron_utils.update_weight import choose_updater
    from slime.utils.engine_client import EngineInfo

    _, chunks = load(weights, Layout(pp=world_size))
    args = make_args(weights, Layout(pp=world_size), update_weight_disk_dir=directory, **flags)
    updater = choose_updater(args, chunks)
    updater.connect([EngineInfo(url, 0, 1, 0)])
    updater.update_weights()
    updater.close()


def _worst_difference(url, weights):
    """(largest |log-prob difference| to transformers with these weights, reported weight version)."""
    import torch
    from transformers import AutoModelForCausalLM

    from slime.utils.engine_client import http_request

    sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    status, text = http_request("POST", url + "/generate", body)
    assert status == 200, text
    import json

    answer = json.loads(text)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        log_probs = model(torch.tensor([PROMPT + answer["output_ids"]])).logits[0].log_softmax(-1)
    rows = answer["meta_info"]["output_token_logprobs"]
    differences = [
        abs(float(log_probs[len(PROMPT) - 1 + i, token]) - value) for i, (value, token, _) in enumerate(rows)
    ]
    assert len(differences) == 24
    return max(differences), answer["meta_info"]["weight_version"]


def test_log_probs_follow_the_pushed_weights(tmp_path):
    """The server starts with other weights; two pipeline stages push; versions and log-probs are the new ones."""
    start = make_tiny_model("qwen3", tmp_path / "start", seed=0, head_dim=32, hidden_size=64)
    with _server(start, tmp_path / "logs") as server:
        for number, (name, flags) in enumerate(TRANSPORTS.items(), start=1):
            weights = make_tiny_model("qwen3", tmp_path / name, seed=number, head_dim=32, hidden_size=64)
            assert _worst_difference(server.url, weights)[0] > 0.01, "the weights must differ before the update"
            run_ranks(_push, 2, weights, server.url, str(tmp_path / "disk"), flags)
            difference, version = _worst_difference(server.url, weights)
            assert difference <= 1e-4, name
            assert version == "1"
