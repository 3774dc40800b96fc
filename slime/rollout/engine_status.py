"""The engines behind the router: where they are, how much they have to do, and how to make them stop."""

import asyncio
import logging
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.utils.async_utils import gather_or_cancel
from slime.utils.http_utils import HttpError, get, post

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 10.0
MAX_POLL_S = 1.0


def get_model_url(args: Namespace, name: str = "default", endpoint: str = "/generate") -> str:
    """URL of `endpoint` at the router of model `name`; "default" is the trained model. ValueError for a name that is
    not served.
    """
    routers = getattr(args, "sglang_model_routers", None) or {}
    if name in routers:
        ip, port = routers[name]
    elif name == "default":
        ip, port = args.sglang_router_ip, args.sglang_router_port
    else:
        raise ValueError(f"no model {name!r} is served; known: {', '.join(sorted({'default', *routers}))}")
    return f"http://{ip}:{port}{endpoint}"


async def list_engines(args: Namespace) -> list[str]:
    """Base URLs of the engines the default model's router knows."""
    answer = await get(get_model_url(args, endpoint="/workers"), timeout=STATUS_TIMEOUT_S)
    return [worker["url"] for worker in answer["workers"]]


async def num_requests(engine_url: str) -> int:
    """Requests an engine is running or has waiting."""
    return count_requests(await get(f"{engine_url}/v1/loads?include=core", timeout=STATUS_TIMEOUT_S))


def count_requests(load: Any) -> int:
    """Requests in a load report, which may be a number of reports: a list, or a dict with `loads`."""
    if isinstance(load, list):
        return sum(map(count_requests, load))
    if "loads" in load:
        return count_requests(load["loads"])
    for key in ("num_reqs", "num_total_reqs", "total_reqs"):
        if key in load:
            return load[key]
    return load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0)


async def abort_engines(args: Namespace, own_requests: Callable[[], int]) -> None:
    """Abort every request of every engine, again and again until they are idle and `own_requests()`, those this
    process waits for, is 0.

    Repeating catches requests that were still on their way. Raises TimeoutError after --rollout-stall-timeout seconds.
    """
    engines = await list_engines(args)
    start, pause = time.monotonic(), 0.02
    while True:
        await gather_or_cancel(
            *(post(f"{url}/abort_request", {"abort_all": True}, 3, timeout=60.0) for url in engines)
        )
        loads = await gather_or_cancel(*map(num_requests, engines))
        if not any(loads) and own_requests() == 0:
            return
        if time.monotonic() - start > args.rollout_stall_timeout:
            raise TimeoutError(
                f"engines still busy {args.rollout_stall_timeout:g} s (--rollout-stall-timeout) after abort_request: "
                f"{dict(zip(engines, loads, strict=True))} requests, {own_requests()} of them unanswered here"
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_POLL_S)


async def describe_engines(args: Namespace) -> str:
    """The engines and their load in words, for an error message; says so when they cannot be asked."""
    router = get_model_url(args, endpoint="")
    try:
        engines = await list_engines(args)
    except HttpError as error:
        return f"router {router}, which does not list its engines ({error})"
    return ", ".join([await _describe(url) for url in engines]) or f"router {router}, which has no engines"


async def _describe(url: str) -> str:
    try:
        return f"{url} ({await num_requests(url)} requests)"
    except HttpError as error:
        return f"{url} (not answering: {error})"
