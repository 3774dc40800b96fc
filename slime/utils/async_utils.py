"""One background event loop for the whole process, so that synchronous code can run coroutines which share
connections.

Knows nothing of what runs on it.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from typing import Any

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def get_loop() -> asyncio.AbstractEventLoop:
    """The process-wide event loop, started on a daemon thread the first time it is asked for."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="slime-async", daemon=True).start()
        return _loop


def started_loop() -> asyncio.AbstractEventLoop | None:
    """The process-wide event loop if anything has asked for it, without starting it."""
    return _loop


def run[T](coro: Coroutine[Any, Any, T]) -> T:
    """Run `coro` on the background loop and block until it returns or raises.

    An interrupt of the waiting thread (Ctrl-C) cancels the coroutine before it is passed on. Calling this from a
    coroutine that runs on the loop itself would wait for ever, hence RuntimeError.
    """
    loop = get_loop()
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        coro.close()
        raise RuntimeError("async_utils.run was called from the background event loop: await the coroutine instead")
    future = asyncio.run_coroutine_threadsafe(coro, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def gather_or_cancel[T](*coros: Coroutine[Any, Any, T]) -> list[T]:
    """Results in order. When one raises or the caller is cancelled, the others are cancelled and over before this
    returns.
    """
    tasks = [asyncio.ensure_future(coro) for coro in coros]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_and_wait(tasks)
        raise


async def cancel_and_wait(tasks: Iterable[asyncio.Future]) -> None:
    """Cancel the tasks and wait until each is over; what they raise is dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
