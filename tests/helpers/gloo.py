"""Run a function on several gloo ranks of this machine, and raise what the first failing rank raised."""

import contextlib
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

DEFAULT_TIMEOUT = 300.0


class RankError(AssertionError):
    """A rank failed; the message holds its number and traceback."""


def run_ranks(fn: Callable, world_size: int, *args: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
    """Call fn(rank, world_size, *args) in world_size fresh processes with a gloo group; return the results by rank.

    fn, args and results must be picklable (fn: a top-level function of a module). One torch thread a rank. RankError
    with the traceback of the first rank that fails, or when `timeout` seconds pass; all ranks are killed then.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    # here, because it is served on a free port from now on; the ranks import for seconds before they would
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(
            target=_rank_main, args=(fn, rank, world_size, store.port, args, results, timeout), daemon=False
        )
        for rank in range(world_size)
    ]
    with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"):
        for process in ranks:
            process.start()
    try:
        return _collect(ranks, results, timeout)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank_main(fn: Callable, rank: int, world_size: int, port: int, args: tuple, results: Any, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        value = fn(rank, world_size, *args)
        dist.barrier()  # a rank that leaves early resets the connections of the others
        dist.destroy_process_group()
        # plain pickle carries tensors by value; the queue's own would share memory of a process that ends
        results.put((rank, pickle.dumps(value), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None


def _collect(ranks: list, results: Any, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    values: dict[int, Any] = {}
    while len(values) < len(ranks):
        if not results.empty():
            rank, value, error = results.get()
            if error is not None:
                raise RankError(f"rank {rank} of {len(ranks)} failed:\n{error}")
            values[rank] = pickle.loads(value)
            continue
        for rank, process in enumerate(ranks):
            if rank not in values and process.exitcode is not None and results.empty():
                raise RankError(f"rank {rank} of {len(ranks)} died with exit code {process.exitcode}, no traceback")
        if time.monotonic() > deadline:
            waiting = sorted(set(range(len(ranks))) - values.keys())
            raise RankError(f"ranks {waiting} of {len(ranks)} did not finish in {timeout:.0f} s")
        time.sleep(0.01)
    return [values[rank] for rank in range(len(ranks))]


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables set while the ranks start (they inherit them)."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
