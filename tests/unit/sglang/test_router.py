"""Router arguments, and a real router process that gains and loses a scripted worker."""

import json
import os
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.backends.sglang_utils.router import Router, build_router_args, router_command_line
from slime.utils.engine_client import EngineError, http_request


def make_args(**overrides):
    return Namespace(router_overrides=overrides, sglang_router_request_timeout_secs=14400)


def command_line(**overrides):
    return router_command_line(
        build_router_args(make_args(**overrides), host="127.0.0.1", port=3100, prometheus_port=4100)
    )


def test_a_slow_engine_is_never_taken_out_of_service():
    line = command_line()
    assert "--disable-circuit-breaker" in line and "--disable-health-check" in line
    assert line[line.index("--request-timeout-secs") + 1] == "14400"
    assert "--policy" not in line


def test_user_flags_win():
    line = command_line(policy="round_robin", log_level="debug", cache_threshold=0.7, dp_aware=True)
    assert line[line.index("--policy") + 1] == "round_robin"
    assert line[line.index("--log-level") + 1] == "debug"
    assert line[line.index("--cache-threshold") + 1] == "0.7"
    assert "--dp-aware" in line


def test_unknown_router_field_names_the_nearest():
    with pytest.raises(ValueError, match="RouterArgs .*'polizy' .nearest: policy"):
        command_line(polizy="random")


class FakeWorker(BaseHTTPRequestHandler):
    """Just enough of an SGLang server for the router's registration."""

    def do_GET(self):
        info = {"model_path": "tiny", "served_model_name": "tiny", "tokenizer_path": "tiny", "is_generation": True}
        self.answer(info | {"tp_size": 1, "dp_size": 1, "version": "0.5.17", "model_type": "qwen3"})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer({"text": "hello"})

    def answer(self, body):
        payload = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass


def test_workers_come_and_go(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeWorker)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    worker = f"http://127.0.0.1:{server.server_port}"
    router = Router(make_args(), log_dir=tmp_path, environ=os.environ)
    try:
        router.wait_ready(60)
        router.client.add_worker(worker)
        assert [entry["url"] for entry in router.client.workers()] == [worker]
        status, text = http_request("POST", f"{router.url}/generate", {"input_ids": [1, 2]})
        assert status == 200 and json.loads(text)["text"] == "hello"
        router.client.remove_worker(worker)
        assert router.client.workers() == []
        router.client.remove_worker(worker)
    finally:
        router.stop()
        server.shutdown()
        server.server_close()
    assert not router.alive() and not router.client.answers()


def test_an_engine_that_is_not_there_is_reported(tmp_path):
    router = Router(make_args(), log_dir=tmp_path, environ=os.environ)
    try:
        router.wait_ready(60)
        with pytest.raises(EngineError, match="did not list http://127.0.0.1:9 as healthy in 1 s"):
            router.client.add_worker("http://127.0.0.1:9", timeout=1)
    finally:
        router.stop()
