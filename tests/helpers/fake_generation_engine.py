"""A small in-process HTTP server that answers like an SGLang engine and like the router in front of it.

It speaks /generate (single and list), /abort_request, /v1/loads, /flush_cache, /health, /model_info and the router's
/workers, runs on its own thread and event loop, and records what it was asked, so that client code can be tested
without a model.
"""

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Reply:
    """What the engine answers for one prompt: the tokens it would generate, at `seconds_per_token` each."""

    tokens: list[int]
    seconds_per_token: float = 0.0
    finish_reason: str | None = None


def random_reply(input_ids: list[int], sampling_params: dict[str, Any]) -> Reply:
    """One to eight tokens below 50 that depend on the prompt and on the request's seed only."""
    rng = random.Random(f"{sampling_params.get('sampling_seed')}:{input_ids}")
    return Reply([rng.randrange(1, 50) for _ in range(rng.randint(1, 8))])


def _of_entry(params: dict[str, Any], i: int) -> dict[str, Any]:
    """Parameters of entry i of a list: a seed counts up from entry to entry."""
    seed = params.get("sampling_seed")
    return params if seed is None else params | {"sampling_seed": seed + i}


@dataclass
class FakeEngine:
    """Use as a context manager; `url` is the base URL of both the engine and the router.

    reply: maps (input_ids, sampling_params) to a Reply. vocab_size: a larger id "kills" the engine (every later answer
    is 500). failures: HTTP statuses to answer the next /generate calls with, one each, before serving again. requests:
    the /generate bodies in arrival order. aborts: number of /abort_request calls.
    """

    reply: Callable[[list[int], dict[str, Any]], Reply] = random_reply
    vocab_size: int = 50
    failures: list[int] = field(default_factory=list)
    weight_version: str = "1"
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborts: int = 0
    num_running: int = 0
    killed: bool = False
    url: str = ""

    def __enter__(self) -> "FakeEngine":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-engine", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def host_port(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def _start(self) -> None:
        self._abort = asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort_request),
                web.get("/v1/loads", self._loads),
                web.get("/workers", self._workers),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._model_info),
                web.get("/health", self._ok),
                web.post("/flush_cache", self._ok),
                web.get("/flush_cache", self._ok),
                web.post("/pause_generation", self._ok),
                web.post("/continue_generation", self._ok),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.failures:
            return web.json_response({"error": {"message": "told to fail"}}, status=self.failures.pop(0))
        ids, params = body["input_ids"], body["sampling_params"]
        if ids and isinstance(ids[0], list):
            params = params if isinstance(params, list) else [_of_entry(params, i) for i in range(len(ids))]
            answers = await asyncio.gather(*(self._one(i, p) for i, p in zip(ids, params, strict=True)))
        else:
            answers = await self._one(ids, params)
        if self.killed:
            return web.json_response({"error": {"message": "engine is dead"}}, status=500)
        return web.json_response(answers)

    async def _one(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if any(not 0 <= i < self.vocab_size for i in input_ids):
            self.killed = True
        reply = self.reply(input_ids, params)
        budget = params["max_new_tokens"]
        tokens, reason = reply.tokens[:budget], reply.finish_reason or "stop"
        if len(reply.tokens) > budget:
            reason = "length"
        if reply.seconds_per_token:
            done = await self._decode(len(tokens), reply.seconds_per_token)
            if done < len(tokens):
                tokens, reason = tokens[:done], "abort"
        return {
            "text": "".join(f"<{t}>" for t in tokens),
            "output_ids": tokens,
            "meta_info": {
                "id": "fake",
                "finish_reason": {"type": reason},
                "prompt_tokens": len(input_ids),
                "completion_tokens": len(tokens),
                "cached_tokens": len(input_ids) // 2,
                "weight_version": self.weight_version,
                "output_token_logprobs": [[-0.125 * (t % 7 + 1), t, None] for t in tokens],
                "e2e_latency": 0.001,
            },
        }

    async def _decode(self, num_tokens: int, seconds_per_token: float) -> int:
        """Number of tokens that came out before an abort, at most num_tokens."""
        self.num_running += 1
        abort = self._abort
        try:
            for done in range(num_tokens):
                try:
                    await asyncio.wait_for(abort.wait(), seconds_per_token)
                    return done
                except TimeoutError:
                    continue
            return num_tokens
        finally:
            self.num_running -= 1

    async def _abort_request(self, request: web.Request) -> web.Response:
        assert (await request.json())["abort_all"] is True
        self.aborts += 1
        self._abort.set()
        self._abort = asyncio.Event()
        return web.Response()

    async def _loads(self, _: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": self.num_running, "num_waiting_reqs": 0}
        return web.json_response({"loads": [load]})

    async def _workers(self, _: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": "0", "url": self.url, "is_healthy": True}], "total": 1})

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": self.weight_version, "is_generation": True})

    async def _ok(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})
