"""One SGLang server (one node of one engine) under a Ray actor on that node, which starts, watches and stops it."""

import logging
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from slime.backends.sglang_utils.ports import reserve_free_port
from slime.backends.sglang_utils.server_process import SGLangServer
from slime.observability.logging_utils import configure_logging
from slime.ray.utils import local_device_index
from slime.utils.engine_client import EngineInfo

logger = logging.getLogger(__name__)

DIST_INIT_PORT_LOW, DIST_INIT_PORT_HIGH = 20000, 25000


@dataclass(frozen=True)
class EngineSlot:
    """Where one node of one engine runs.

    rank: index of the engine. node_rank: 0 .. nnodes - 1 within the engine; only node 0 answers HTTP.
    slot: index of its first device in the rollout placement. gpu_id: that device.
    """

    rank: int
    node_rank: int
    nnodes: int
    slot: int
    gpu_id: int | str

    @property
    def name(self) -> str:
        return f"engine {self.rank}" + (f" node {self.node_rank}" if self.nnodes > 1 else "")


class SGLangEngine:
    """Ray runs the calls one after the other; each but `start` returns quickly."""

    def __init__(self, args: Namespace, slot: EngineSlot) -> None:
        configure_logging()
        self._args = args
        self._slot = slot
        self._server: SGLangServer | None = None

    def pick_dist_init_addr(self) -> str:
        """host:port on this node where the nodes of the engine can meet."""
        address = ray.util.get_node_ip_address()
        with reserve_free_port(address, DIST_INIT_PORT_LOW, DIST_INIT_PORT_HIGH) as reservation:
            return f"{address}:{reservation.getsockname()[1]}"

    def start(self, dist_init_addr: str | None) -> EngineInfo | None:
        """Starts the server and waits until it generates; None on the further nodes of an engine.

        Raises EngineError with the end of the server's log if it dies or args.engine_start_timeout passes.
        """
        args, slot = self._args, self._slot
        base_gpu_id = 0
        if args.accelerator == "cuda":
            base_gpu_id = local_device_index(slot.gpu_id, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._server = SGLangServer(
            args,
            rank=slot.rank,
            log_dir=args.log_dir,
            environ=os.environ,
            host=ray.util.get_node_ip_address(),
            dist_init_addr=dist_init_addr,
            nnodes=slot.nnodes,
            node_rank=slot.node_rank,
            base_gpu_id=base_gpu_id,
        )
        self._server.wait_ready(args.engine_start_timeout)
        if slot.node_rank:
            return None
        fields = self._server.fields
        return EngineInfo(
            url=self._server.url,
            rank=slot.rank,
            num_gpus=args.rollout_num_gpus_per_engine,
            gpu_offset=slot.slot,
            parallel_config={name: fields.get(name, 1) for name in ("tp_size", "pp_size", "ep_size", "moe_dp_size")},
        )

    def check(self) -> None:
        """Raises EngineError with the end of the server's log if it has ended."""
        self._server.check_alive()

    def release_memory(self) -> None:
        """Gives the device memory of weights and cache back; the server must be idle."""
        if self._slot.node_rank == 0:
            self._server.client.flush_cache()
            self._server.client.release_memory_occupation()

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Takes memory again. tags: of weights, kv_cache, cuda_graph."""
        if self._slot.node_rank == 0:
            self._server.client.resume_memory_occupation(list(tags))

    def stop(self) -> None:
        """Ends the server's process tree."""
        if self._server is not None:
            self._server.stop()


def plan_engines(args: Namespace, gpu_ids: Sequence[int | str], nodes: Sequence[str]) -> list[EngineSlot]:
    """The engines of args.rollout_num_gpus devices, engine nodes in the order of the devices they take.

    gpu_ids, nodes: physical id and node of each slot of the rollout placement. An engine takes consecutive devices of
    a node, because SGLang counts upwards from the first. Raises ValueError if the devices do not fill the engines or
    do not line up.
    """
    total, per_engine = len(gpu_ids), args.rollout_num_gpus_per_engine
    per_node = min(per_engine, args.num_gpus_per_node)
    if total % per_engine or per_engine % per_node:
        raise ValueError(
            f"--rollout-num-gpus {total}, --rollout-num-gpus-per-engine {per_engine}, "
            f"--num-gpus-per-node {args.num_gpus_per_node}: {per_engine} must divide {total}, and "
            f"{per_node} (GPUs of an engine on one node) must divide {per_engine}"
        )
    nnodes = per_engine // per_node
    slots = []
    for start in range(0, total, per_node):
        span = slice(start, start + per_node)
        slot = EngineSlot(start // per_engine, start % per_engine // per_node, nnodes, start, gpu_ids[start])
        _check_consecutive(args, slot, gpu_ids[span], nodes[span])
        slots.append(slot)
    return slots


def _check_consecutive(args: Namespace, slot: EngineSlot, gpu_ids: Sequence[int | str], nodes: Sequence[str]) -> None:
    if args.accelerator != "cuda" or len(gpu_ids) == 1:
        return
    numbers = [int(gpu_id) if str(gpu_id).isdecimal() else gpu_id for gpu_id in gpu_ids]
    first = numbers[0]
    in_a_row = not isinstance(first, int) or numbers == list(range(first, first + len(numbers)))
    if len(set(nodes)) > 1 or not in_a_row:
        places = ", ".join(f"{node}/{gpu_id}" for node, gpu_id in zip(nodes, gpu_ids, strict=True))
        raise ValueError(
            f"{slot.name} needs {len(gpu_ids)} consecutive GPUs of one node but would get {places}; "
            f"set --num-gpus-per-node to what a node has, and free the GPUs in between"
        )


def by_name(slots: Sequence[EngineSlot], values: Sequence[Any]) -> Mapping[str, Any]:
    """Values of the engine nodes under their names."""
    return {slot.name: value for slot, value in zip(slots, values, strict=True)}
