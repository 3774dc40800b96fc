"""An HTTP server that looks like the weight endpoints of an SGLang server and keeps what it receives, on the CPU."""

import base64
import json
import pickle
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class FakeEngine:
    """Weights end up in `weights` (name -> tensor), calls in `calls` (endpoint names). Use as a context manager.

    fail_at: an endpoint that answers HTTP 400.
    """

    def __init__(self, fail_at: str | None = None):
        self.weights: dict[str, Any] = {}
        self.calls: list[str] = []
        self.version = "default"
        self.paused = False
        self.fail_at = fail_at
        self._groups: dict[str, Any] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "FakeEngine":
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, endpoint: str, body: dict[str, Any]) -> None:
        """Do what SGLang does at this endpoint. AssertionError for a call out of order."""
        self.calls.append(endpoint)
        if endpoint == self.fail_at:
            raise AssertionError(f"{endpoint} was told to fail")
        if endpoint.startswith("update_weights"):
            assert self.paused, "weights came while generating"
            self.version = body.get("weight_version", self.version)
        handler = getattr(self, f"_{endpoint}", None)
        if handler is not None:
            handler(body)

    def _pause_generation(self, body: dict[str, Any]) -> None:
        self.paused = True

    def _continue_generation(self, body: dict[str, Any]) -> None:
        self.paused = False

    def _update_weights_from_tensor(self, body: dict[str, Any]) -> None:
        (payload,) = body["serialized_named_tensors"]
        self.weights.update(pickle.loads(base64.b64decode(payload)))

    def _update_weights_from_disk(self, body: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        path = Path(body["model_path"])
        assert (path / "config.json").is_file()
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        for file in sorted(set(index.values())):
            self.weights.update(load_file(path / file))
        assert self.weights.keys() == index.keys()

    def _init_weights_update_group(self, body: dict[str, Any]) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

        limit = timedelta(seconds=60)
        store = dist.TCPStore(
            body["master_address"], body["master_port"], body["world_size"], is_master=False, timeout=limit
        )
        # the key prefixes that torch's own group constructor adds for a group of this name
        name = body["group_name"]
        prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._groups[name] = ProcessGroupGloo(prefixed, body["rank_offset"], body["world_size"], limit)

    def _destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        del self._groups[body["group_name"]]

    def _update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        assert body["load_format"] == "flattened_bucket"
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        shapes = [torch.Size(shape) for shape in body["shapes"]]
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._groups[body["group_name"]].broadcast([buffer], options).wait()
        for name, part, dtype, shape in zip(body["names"], buffer.split(sizes), dtypes, shapes, strict=True):
            self.weights[name] = part.clone().view(dtype).view(shape)


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._respond(json.loads(self.rfile.read(length) or b"{}"))

        def do_GET(self) -> None:
            self._respond({})

        def _respond(self, body: dict[str, Any]) -> None:
            status, answer = 200, {"success": True, "message": ""}
            try:
                engine.answer(self.path.strip("/"), body)
            except Exception as error:  # as SGLang: every failure becomes an answer
                status, answer = 400, {"success": False, "message": f"{type(error).__name__}: {error}"}
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
