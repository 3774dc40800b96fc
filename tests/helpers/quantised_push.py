"""A trainer on one device that pushes checkpoints into running engines, in the format of the engines' checkpoint."""

import pickle
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRANSPORTS: dict[str, dict[str, Any]] = {
    "tensor": {"colocate": True},
    "disk": {"colocate": True, "update_weight_transport": "disk"},
    "distributed": {"colocate": False},
}
BUFFER = 300_000  # bytes: several buckets


@dataclass(frozen=True)
class Job:
    """Push unquantised directories into one engine, one after the other, by each transport.

    served: the quantised directory that the engine at `url` has started from, by whose config.json weights are
    quantised.
    """

    engine: str
    url: str
    served: Path
    weights: dict[str, Path]
    transports: Sequence[str]


@dataclass(frozen=True)
class Heard:
    """What an engine says after a push: log-probs of the prompt, checksums of its parameters, weight version."""

    log_probs: list[float]
    checksums: dict[str, str]
    version: str


# engine -> ({(transport, name of the weights): what the engine says then}, traceback of a failed push or None)
Found = dict[str, tuple[dict[tuple[str, str], Heard], str | None]]


def push(rank: int, world_size: int, jobs: Sequence[Job], scratch: Path, length: int, accelerator: str) -> None:
    """Do the jobs. What is heard is kept in scratch/heard.pickle at once, for `heard`: a push may hang.

    After a failure the other pushes of that job are not tried.
    """
    import torch

    from slime.utils.accelerator import get_accelerator
    from tests.helpers.engines import say

    get_accelerator(accelerator).prepare_trainer()
    if accelerator == "cuda":
        torch.cuda.set_device(0)
    from slime.backends.megatron_utils import torch_te

    torch_te.install()
    scratch.mkdir(exist_ok=True)
    found: Found = {}
    for job in jobs:
        before = found[job.engine] = found.get(job.engine, ({}, None))
        try:
            for place, said in _push(job, scratch, length, accelerator):
                before[0][place] = said
                (scratch / "heard.pickle").write_bytes(pickle.dumps(found))
        except Exception:  # for the test of this engine to look at; the others go on
            failure = traceback.format_exc()
            say(f"{job.engine}: failed after {list(before[0])}: {failure.splitlines()[-1][:200]}")
            found[job.engine] = before[0], failure
            (scratch / "heard.pickle").write_bytes(pickle.dumps(found))


def heard(scratch: Path) -> Found:
    """What `push` has heard so far."""
    path = scratch / "heard.pickle"
    return pickle.loads(path.read_bytes()) if path.is_file() else {}


def _push(job: Job, scratch: Path, length: int, accelerator: str) -> Iterator[tuple[tuple[str, str], Heard]]:
    from slime.backends.megatron_utils.convert_args import conversion_args
    from slime.backends.megatron_utils.initialize import initialize_megatron, shutdown_megatron
    from slime.utils.accelerator import get_accelerator
    from tests.helpers.bridge_runs import chunks_of, load
    from tests.helpers.engines import checksums, prompt_log_probs, say

    args, _ = conversion_args(next(iter(job.weights.values())))
    initialize_megatron(args)
    try:
        chunks = [chunk.to(get_accelerator(accelerator).device(0)) for chunk in chunks_of(args)]
        for transport in job.transports:
            own = {"hf_checkpoint": str(job.served), "accelerator": accelerator, "update_weight_buffer_size": BUFFER}
            own |= {"update_weight_disk_dir": str(scratch / "disk")} | TRANSPORTS[transport]
            updater = _connected(Namespace(**(vars(args) | own)), chunks, job.url)
            for name, path in job.weights.items():
                load(args, chunks, path)
                metrics = updater.update_weights()
                say(f"{job.engine}: {name} came by {transport}, {metrics['perf/update_weights_bytes']:.0f} bytes")
                values, held = prompt_log_probs(job.url, length), checksums(job.url)
                yield (transport, name), Heard(values, held, updater.clients[0].weight_version())
            updater.close()
    finally:
        shutdown_megatron()


def _connected(args: Namespace, chunks: list, url: str) -> Any:
    import torch

    from slime.backends.megatron_utils.update_weight import choose_updater
    from slime.utils.engine_client import EngineInfo

    updater = choose_updater(args, chunks)
    if hasattr(updater, "backend") and torch.cuda.device_count() < 2:
        updater.backend = "gloo"  # NCCL refuses two processes on one GPU; the requests and the bytes are the same
    updater.connect([EngineInfo(url, 0, 1, 0)])
    return updater
