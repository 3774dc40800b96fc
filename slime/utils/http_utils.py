"""Asynchronous JSON over HTTP for everything that talks to the router, the engines or a reward server.

Connections are kept and reused; what can succeed later is tried again a bounded number of times, what cannot is raised
at once.
"""

import asyncio
import atexit
import json
import logging
import weakref
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import aiohttp

from slime.utils.async_utils import run, started_loop

logger = logging.getLogger(__name__)

RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
MAX_RETRY_DELAY_S = 1.0
CONNECT_TIMEOUT_S = 30.0
SPARE_CONNECTIONS = 64  # per host, so that an abort or a health check never waits behind generation


@dataclass
class _ClientConfig:
    """max_connections: requests at work at one host at once. timeout_s: whole request, from sending to the last byte
    of the answer.
    """

    max_connections: int = 1024
    timeout_s: float = 14400.0


_config = _ClientConfig()
_sessions: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession]" = weakref.WeakKeyDictionary()


class HttpError(RuntimeError):
    """A request that failed for good. `status` is the last HTTP status, None when there was no answer at all."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def get_rollout_num_engines(args: Namespace) -> int:
    """Number of engines that serve the rollout: given for external engines, else GPUs over GPUs per engine; 0 without
    GPUs.
    """
    if getattr(args, "rollout_num_engines", None) is not None:
        return args.rollout_num_engines
    if not args.rollout_num_gpus:
        return 0
    return max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)


def init_http_client(args: Namespace) -> None:
    """Size the client for `--sglang-server-concurrency` requests on every engine; call before the first request.

    Connections of the background loop are closed when the process exits.
    """
    _config.max_connections = args.sglang_server_concurrency * max(1, get_rollout_num_engines(args))
    _config.timeout_s = float(args.sglang_router_request_timeout_secs)
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    timeout: float | None = None,
) -> Any:
    """POST `payload` as JSON; returns the decoded JSON answer, or its text when it is not JSON.

    A lost connection and the statuses 408, 429 and 5xx are tried again, after 0.05 s doubling up to 1 s, at most
    `max_retries` times; any other status >= 400 is final. timeout: seconds of one attempt, default the client's.
    Raises HttpError with URL, number of attempts and the last reason.
    """
    data = json.dumps(payload).encode()
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    return await _request("POST", url, max_retries=max_retries, timeout=timeout, data=data, headers=all_headers)


async def get(url: str, timeout: float | None = None) -> Any:
    """GET once; returns JSON or text. Raises HttpError."""
    return await _request("GET", url, max_retries=0, timeout=timeout)


async def _request(method: str, url: str, *, max_retries: int, timeout: float | None, **kwargs: Any) -> Any:
    limit_s = _config.timeout_s if timeout is None else timeout
    client_timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_TIMEOUT_S)
    for attempt in range(1, max_retries + 2):
        status = None
        try:
            async with _session().request(method, url, timeout=client_timeout, **kwargs) as response:
                status, body = response.status, await response.read()
        except aiohttp.ConnectionTimeoutError:
            reason = f"no connection within {CONNECT_TIMEOUT_S:g} s"
        except TimeoutError as error:
            reason = f"no answer within {limit_s:g} s ({type(error).__name__})"
        except aiohttp.ClientError as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            if status < 400:
                return _decode(body)
            reason = f"HTTP {status}: {body[:500].decode(errors='replace')}"
        if attempt > max_retries or (status is not None and status not in RETRIED_STATUS):
            raise HttpError(f"{method} {url} failed after {attempt} attempt(s): {reason}", status)
        if attempt in (1, 10):
            logger.warning(
                "%s %s: attempt %d of %d failed, trying again: %s", method, url, attempt, max_retries + 1, reason
            )
        await asyncio.sleep(min(0.05 * 2 ** min(attempt - 1, 10), MAX_RETRY_DELAY_S))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _session() -> aiohttp.ClientSession:
    """The session of the running event loop: a session belongs to the loop it was made on."""
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=_config.max_connections + SPARE_CONNECTIONS)
        session = _sessions[loop] = aiohttp.ClientSession(connector=connector, trust_env=False)
    return session


async def close_http_client() -> None:
    """Close the running loop's connections."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


def _close_at_exit() -> None:
    """Nothing to close where nothing was requested; starting the loop for it is no longer possible at exit."""
    loop = started_loop()
    if loop is not None and loop in _sessions:
        run(close_http_client())


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
