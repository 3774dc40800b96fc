"""A process that owns one SGLang server and one router and then waits: to be killed, or to be told to stop by EOF.

    python -m tests.helpers.engine_owner CHECKPOINT LOG_DIR

Prints one JSON line {"supervisors": [pid, pid]} at once and one {"server": url, "router": url} when both are ready.
"""

import json
import os
import sys
from argparse import Namespace

from slime.backends.sglang_utils.router import Router
from slime.backends.sglang_utils.server_process import SGLangServer


def engine_args(checkpoint: str, **sglang_overrides: object) -> Namespace:
    """The arguments that engines and routers read, for one CPU engine."""
    return Namespace(
        accelerator="cpu",
        hf_checkpoint=checkpoint,
        sglang_overrides=sglang_overrides,
        router_overrides={},
        sglang_router_request_timeout_secs=300,
        rollout_num_gpus_per_engine=1,
        seed=1,
        num_gpus_per_node=1,
        offload_rollout=False,
        fp16=False,
        bf16=False,
    )


def main(checkpoint: str, log_dir: str) -> None:
    args = engine_args(checkpoint, enable_deterministic_inference=True, skip_tokenizer_init=True)
    server = SGLangServer(args, rank=0, log_dir=log_dir, environ=os.environ)
    router = Router(args, log_dir=log_dir, environ=os.environ)
    print(json.dumps({"supervisors": [server.pid, router.pid]}), flush=True)
    try:
        router.wait_ready(120)
        server.wait_ready(500)
        router.client.add_worker(server.url)
        print(json.dumps({"server": server.url, "router": router.url}), flush=True)
        sys.stdin.read()
    finally:
        router.stop()
        server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
