"""One weight update, whatever the transport: pause the engines, empty their caches, send, let them go on."""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.common import agree
from slime.utils.engine_client import EngineClient, EngineInfo

ENGINE_TIMEOUT = 600.0


@dataclass
class Sent:
    """What one rank sent: bytes on the wire (or file system) and requests to engines."""

    bytes: int = 0
    requests: int = 0

    def add(self, size: int, requests: int) -> None:
        """Count some more."""
        self.bytes += size
        self.requests += requests


class WeightUpdater(ABC):
    """Sends the weights of `model_chunks` to all connected engines. Every train rank makes one and calls it in step.

    weight_version counts the updates; engines report it as a decimal string with every response.
    """

    def __init__(self, args: Namespace, model_chunks: Sequence[torch.nn.Module]):
        self.args, self.model_chunks = args, model_chunks
        self.weight_version = 0
        self.engines: list[EngineInfo] = []
        self.clients: list[EngineClient] = []

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Use these engines from now on. Collective; ValueError without an engine."""
        if not engines:
            raise ValueError("no engine to send weights to")
        self.engines = list(engines)
        self.clients = [EngineClient(engine.url, timeout=ENGINE_TIMEOUT) for engine in engines]

    def update_weights(self) -> dict[str, float]:
        """Bring all engines to the current weights. Collective; all ranks raise when one fails.

        Engines with part of the weights must not serve, so after a failure they stay paused; a later update that
        succeeds resumes them. Returns metrics: bytes and
        requests of all ranks together, and the version.
        """
        if not self.clients:
            raise RuntimeError("connect() to the engines before update_weights()")
        self.weight_version += 1
        agree(self._on_main_rank, _pause)
        sent = agree(self.send)
        agree(self._on_main_rank, EngineClient.continue_generation)
        everywhere: list[Sent] = [sent] * dist.get_world_size()
        dist.all_gather_object(everywhere, sent)
        return {
            "perf/update_weights_bytes": float(sum(one.bytes for one in everywhere)),
            "perf/update_weights_requests": float(sum(one.requests for one in everywhere)),
            "perf/update_weights_version": float(self.weight_version),
        }

    @abstractmethod
    def send(self) -> Sent:
        """Send everything, between pause and continue. Every rank calls it."""

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Release what connect() made."""

    def on_all_engines(self, call: Callable[[EngineClient], object]) -> None:
        """call(client) for all engines at once; raises the first failure after all have answered."""
        with ThreadPoolExecutor(max_workers=len(self.clients)) as pool:
            for future in [pool.submit(call, client) for client in self.clients]:
                future.result()

    def _on_main_rank(self, call: Callable[[EngineClient], object]) -> None:
        if dist.get_rank() == 0:
            self.on_all_engines(call)


def _pause(client: EngineClient) -> None:
    client.pause_generation()
    client.flush_cache()
