"""The HTTP client: what is tried again and what is not, time-outs, reuse of connections, one session a loop."""

import asyncio
import subprocess
import sys
import threading
import time
from argparse import Namespace

import pytest
from aiohttp import web

from slime.utils import async_utils, http_utils
from slime.utils.async_utils import gather_or_cancel, run
from slime.utils.http_utils import HttpError, get, get_rollout_num_engines, init_http_client, post


class Server:
    """Answers with the given statuses in turn, then 200; counts requests and connections."""

    def __init__(self, statuses=(), delay=0.0, body='{"ok": 1}'):
        self.statuses, self.delay, self.body = list(statuses), delay, body
        self.requests, self.connections, self.headers = 0, set(), None

    async def handle(self, request):
        self.requests += 1
        self.headers = request.headers
        self.connections.add(request.transport.get_extra_info("peername"))
        await asyncio.sleep(self.delay)
        return web.Response(text=self.body, status=self.statuses.pop(0) if self.statuses else 200)

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/x", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/x"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()


def against(server, use):
    async def main():
        async with server:
            try:
                return await use(server.url)
            finally:
                await http_utils.close_http_client()

    return asyncio.run(main())


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status):
    server = Server([status] * 3)
    assert against(server, lambda url: post(url, {})) == {"ok": 1} and server.requests == 4


@pytest.mark.parametrize("status", [400, 401, 404, 422, 501])
def test_what_will_not_change_is_raised_at_once(status):
    server = Server([status] * 3, body="too long")
    with pytest.raises(
        HttpError, match=rf"POST http\S+ failed after 1 attempt\(s\): HTTP {status}: too long"
    ) as error:
        against(server, lambda url: post(url, {}))
    assert server.requests == 1 and error.value.status == status


def test_attempts_are_bounded_and_the_last_reason_is_told():
    server = Server([503] * 9, body="overloaded")
    with pytest.raises(HttpError, match=r"after 3 attempt\(s\): HTTP 503: overloaded"):
        against(server, lambda url: post(url, {}, max_retries=2))
    assert server.requests == 3
    with pytest.raises(HttpError, match=r"after 2 attempt\(s\): ClientConnectorError") as error:
        against(Server(), lambda url: post("http://127.0.0.1:9/x", {}, max_retries=1))
    assert error.value.status is None


def test_one_attempt_is_timed():
    start = time.monotonic()
    with pytest.raises(HttpError, match=r"after 1 attempt\(s\): no answer within 0.1 s"):
        against(Server(delay=5), lambda url: get(url, timeout=0.1))
    assert time.monotonic() - start < 2


def test_get_is_tried_once_and_text_comes_back_as_text():
    server = Server([503])
    with pytest.raises(HttpError):
        against(server, get)
    assert server.requests == 1
    assert against(Server(body="plain"), get) == "plain"


def test_connections_are_reused_and_headers_sent():
    server = Server()

    async def many(url):
        for _ in range(20):
            await post(url, {"a": 1}, headers={"X-Key": "k"})

    against(server, many)
    assert len(server.connections) == 1 and server.requests == 20 and server.headers["X-Key"] == "k"


def test_two_event_loops_do_not_share_a_session():
    """asyncio.run in a second thread while the first loop is alive: sessions belong to their loop."""
    server = Server()

    async def main():
        async with server:
            await post(server.url, {})
            other = {}

            async def elsewhere():
                await post(server.url, {})
                await http_utils.close_http_client()

            thread = threading.Thread(target=lambda: other.update(result=asyncio.run(elsewhere())))
            thread.start()
            while thread.is_alive():
                await asyncio.sleep(0.01)
            await post(server.url, {})
            await http_utils.close_http_client()
            return other

    assert asyncio.run(main()) == {"result": None} and len(server.connections) == 2


def test_engine_count_and_client_size(monkeypatch):
    args = Namespace(
        rollout_num_gpus=9,
        rollout_num_gpus_per_engine=4,
        sglang_server_concurrency=5,
        sglang_router_request_timeout_secs=7,
    )
    assert get_rollout_num_engines(args) == 2
    monkeypatch.setattr(http_utils, "_config", http_utils._ClientConfig())
    init_http_client(args)
    assert http_utils._config == http_utils._ClientConfig(max_connections=10, timeout_s=7.0)
    args.rollout_num_gpus = 2
    assert get_rollout_num_engines(args) == 1
    args.rollout_num_gpus = 0
    assert get_rollout_num_engines(args) == 0
    args.rollout_num_engines = 3
    assert get_rollout_num_engines(args) == 3


AT_EXIT = """
from argparse import Namespace
from slime.utils.http_utils import {names}
init_http_client(Namespace(rollout_num_gpus=1, rollout_num_gpus_per_engine=1, sglang_server_concurrency=5,
                           sglang_router_request_timeout_secs=7))
{use}
"""


def test_a_process_that_ends_is_silent_with_and_without_requests():
    async def main():
        server = Server()
        async with server:
            uses = {"": "init_http_client", f"run(post({server.url!r}, {{}}))": "init_http_client, post, run"}
            for use, names in uses.items():
                command = [sys.executable, "-c", AT_EXIT.format(names=names, use=use)]
                done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
                assert (done.stdout, done.stderr) == ("", "")
        assert server.requests == 1

    asyncio.run(main())


# ---- the background loop ----


async def value(x):
    await asyncio.sleep(0)
    return x


def test_run_uses_one_loop_and_passes_errors_on():
    async def loop_id():
        return id(asyncio.get_running_loop())

    assert run(loop_id()) == run(loop_id()) == id(async_utils.get_loop())
    with pytest.raises(ZeroDivisionError):
        run(divide_by_zero())


async def divide_by_zero():
    return 1 / 0


def test_run_from_its_own_loop_is_refused_instead_of_hanging():
    async def nested():
        with pytest.raises(RuntimeError, match="await the coroutine instead"):
            run(value(1))
        return True

    assert run(nested())


def test_gather_ends_the_others_when_one_fails():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def main():
        assert await gather_or_cancel(value(1), value(2)) == [1, 2]
        with pytest.raises(ZeroDivisionError):
            await gather_or_cancel(slow(), divide_by_zero(), slow())

    run(main())
    assert ended == [True, True]
