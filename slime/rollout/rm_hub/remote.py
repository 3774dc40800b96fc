"""The reward of a remote HTTP service, `--rm-url`."""

import asyncio
import logging
import random
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from slime.utils.types import Sample

logger = logging.getLogger(__name__)

ATTEMPTS = 10
TIMEOUT_S = 120.0
MAX_CONNECTIONS = 64
MAX_BACKOFF_S = 30.0
_RETRIED_CLIENT_ERRORS = (408, 429)

# A client belongs to the event loop that made its connections.
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


async def remote_rm(args: Any, sample: Sample, *, response: str | None = None) -> Any:
    """POST {"prompt", "response", "label"} to `args.rm_url`; the JSON answer is the reward.

    Tries 10 times, waiting min(2^k, 30) + U(0, 1) seconds in between; a client error (4xx other than 408 and 429) is
    final at once. Raises ValueError without --rm-url, RuntimeError naming url, attempts and last failure.
    """
    if not getattr(args, "rm_url", None):
        raise ValueError("rm type 'remote_rm' needs --rm-url")
    payload = {
        "prompt": sample.prompt,
        "response": sample.response if response is None else response,
        "label": sample.label,
    }
    for attempt in range(1, ATTEMPTS + 1):
        try:
            answer = await _client().post(args.rm_url, json=payload)
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            failure = f"status {status}: {error.response.text[:200]}"
            final = 400 <= status < 500 and status not in _RETRIED_CLIENT_ERRORS
        except (httpx.TransportError, ValueError) as error:  # ValueError: the body is not JSON
            failure, final = f"{type(error).__name__}: {error}", False
        if final or attempt == ATTEMPTS:
            raise RuntimeError(f"remote reward {args.rm_url} failed, attempt {attempt} of {ATTEMPTS}: {failure}")
        logger.warning("remote reward %s, attempt %d of %d: %s", args.rm_url, attempt, ATTEMPTS, failure)
        await asyncio.sleep(min(2.0**attempt, MAX_BACKOFF_S) + random.random())


def _client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            timeout=httpx.Timeout(TIMEOUT_S, pool=None),  # waiting for a free connection is no failure of the service
            trust_env=False,
        )
    return _clients[loop]
