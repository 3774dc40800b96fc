"""Several SGLang servers at once, for tests that compare what they say.

They start together: a start is mostly imports and compiled kernels, so eight take little longer than one.
"""

import contextlib
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.backends.sglang_utils.server_process import SGLangServer

# Small prompts only: no captured graphs, a small cache.
_SMALL = {"skip_tokenizer_init": True, "max_total_tokens": 4096, "context_length": 512, "max_running_requests": 8}
_CPU = {"mem_fraction_static": 0.1}
# the fraction only bounds what the engines, which share the device, find taken by each other
_GPU = {
    "mem_fraction_static": 0.5,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
}


def say(what: str) -> None:
    """A line of progress that pytest's -s shows at once: these tests are silent for minutes otherwise."""
    sys.stderr.write(f"\n{time.strftime('%H:%M:%S')} {what}")
    sys.stderr.flush()


@contextlib.contextmanager
def running_engines(
    models: Mapping[str, Path], log_dir: Path, accelerator: str = "cuda", timeout: float = 180.0
) -> "Iterator[dict[str, SGLangServer]]":
    """A running server for each name and Hugging Face directory, all on one device, in bfloat16 (float32 on the CPU).

    One that does not come up in `timeout` seconds is told with the end of its log, and missing in the result.
    """
    from slime.backends.sglang_utils.server_process import SGLangServer
    from slime.utils.engine_client import EngineError

    started = time.monotonic()
    servers: dict[str, SGLangServer] = {}
    try:
        for rank, (name, path) in enumerate(models.items()):
            servers[name] = SGLangServer(_args(path, accelerator), rank=rank, log_dir=log_dir, environ=os.environ)
        say(f"{len(servers)} engines are starting: {', '.join(servers)}")
        ready = {}
        for name, server in servers.items():
            try:
                server.wait_ready(max(1.0, timeout - (time.monotonic() - started)))
            except EngineError as error:
                say(f"{name} does not come up: {error}")
                continue
            ready[name] = server
            say(f"{name} answers, {time.monotonic() - started:.0f} s after the start")
        yield ready
    finally:
        for server in servers.values():
            server.stop()


def _args(path: Path, accelerator: str) -> Namespace:
    on_gpu = accelerator == "cuda"
    return Namespace(
        accelerator=accelerator,
        hf_checkpoint=str(path),
        sglang_overrides=_SMALL | (_GPU if on_gpu else _CPU),
        rollout_num_gpus_per_engine=1,
        num_gpus_per_node=1,
        seed=1,
        offload_rollout=False,
        fp16=False,
        bf16=on_gpu,
    )


def prompt_log_probs(url: str, length: int) -> list[float]:
    """Log-probs of tokens 1 to length - 1 of the prompt 3, 4, 5, ..."""
    from slime.utils.engine_client import http_request

    body = {
        "input_ids": list(range(3, 3 + length)),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    status, text = http_request("POST", url + "/generate", body, timeout=120.0)
    assert status == 200, text
    return [entry[0] for entry in json.loads(text)["meta_info"]["input_token_logprobs"][1:]]


def checksums(url: str) -> dict[str, str]:
    """Of every parameter that the engine holds, as its kernels see it."""
    from slime.utils.engine_client import EngineClient

    (rank,) = EngineClient(url).weights_checksum()["ranks"]
    return rank["checksums"]
