"""Weights to engines on other devices: each pipeline stage broadcasts its buckets in a group with all engines."""

import logging
import socket
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from megatron.core import mpu

from slime.backends.megatron_utils.update_weight.base import ENGINE_TIMEOUT, Sent, WeightUpdater
from slime.backends.megatron_utils.update_weight.buckets import Bucket, flatten
from slime.backends.megatron_utils.update_weight.common import agree, hf_buckets, is_weight_source
from slime.backends.megatron_utils.update_weight.process_group import join_group
from slime.utils.engine_client import EngineClient, EngineInfo

logger = logging.getLogger(__name__)

JOIN_TIMEOUT = 300.0


class UpdateWeightFromDistributed(WeightUpdater):
    """NCCL (gloo on the CPU) broadcast. Group "slime-pp_<stage>": rank 0 is the stage's source, then engine devices.

    Stages take turns: two broadcasts at once on different groups would deadlock in the engines, which serve requests
    one after the other.
    """

    def __init__(self, args: Namespace, model_chunks: Sequence[torch.nn.Module]):
        super().__init__(args, model_chunks)
        self.backend = "nccl" if args.accelerator == "cuda" else "gloo"
        self.group_name = f"slime-pp_{mpu.get_pipeline_model_parallel_rank()}"
        self._group: dist.ProcessGroup | None = None

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Make the groups, stage after stage; groups of an earlier connect are left first. Collective."""
        agree(self.close)
        super().connect(engines)
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            agree(self._join, stage)

    def close(self) -> None:
        """Leave the group, on both sides. An engine that is gone cannot answer, which is no reason to fail."""
        if self._group is None:
            return
        with ThreadPoolExecutor(max_workers=len(self.clients)) as pool:
            leaving = [pool.submit(client.destroy_weights_update_group, self.group_name) for client in self.clients]
        for client, future in zip(self.clients, leaving, strict=True):
            if future.exception() is not None:
                logger.warning("%s did not leave group %s: %s", client.url, self.group_name, future.exception())
        dist.destroy_process_group(self._group)
        self._group = None

    def send(self) -> Sent:
        """All buckets, stage after stage."""
        sent = Sent()
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            agree(self._send_stage, stage, sent)
        return sent

    def _join(self, stage: int) -> None:
        if stage != mpu.get_pipeline_model_parallel_rank() or not is_weight_source():
            return
        host = host_address(self.engines)
        port = free_port(host)
        world_size = 1 + sum(engine.num_gpus for engine in self.engines)
        with ThreadPoolExecutor(max_workers=len(self.clients)) as pool:
            joining, offset = [], 1
            for client, engine in zip(self.clients, self.engines, strict=True):
                joining.append(
                    pool.submit(
                        client.init_weights_update_group,
                        host,
                        port,
                        offset,
                        world_size,
                        self.group_name,
                        self.backend,
                    )
                )
                offset += engine.num_gpus
            self._group = join_group(self.backend, host, port, world_size, self.group_name, JOIN_TIMEOUT)
            for future in joining:
                future.result()

    def _send_stage(self, stage: int, sent: Sent) -> None:
        if stage != mpu.get_pipeline_model_parallel_rank() or not is_weight_source(with_peers=True):
            return
        for bucket in hf_buckets(self.args, self.model_chunks, self.args.update_weight_buffer_size):
            if is_weight_source():
                self._send_bucket(bucket)
                sent.add(sum(tensor.nbytes for _, tensor in bucket), len(self.clients))

    def _send_bucket(self, bucket: Bucket) -> None:
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype) for _, tensor in bucket]
        shapes = [tuple(tensor.shape) for _, tensor in bucket]
        buffer = flatten(bucket)

        def receive(client: EngineClient) -> None:
            client.update_weights_from_distributed(
                names, dtypes, shapes, self.group_name, str(self.weight_version), "flattened_bucket"
            )

        pool = ThreadPoolExecutor(max_workers=len(self.clients))
        receiving = [pool.submit(receive, client) for client in self.clients]
        try:
            work = dist.broadcast(buffer, src=0, group=self._group, async_op=True)
            _wait(work, receiving)
        finally:
            pool.shutdown(wait=False)


def _wait(work: dist.Work, receiving: Sequence[Future]) -> None:
    """Until the broadcast and all engines are done. An engine that refuses is raised at once: it never joins in."""
    deadline = time.monotonic() + ENGINE_TIMEOUT
    while not (work.is_completed() and all(future.done() for future in receiving)):
        for future in receiving:
            if future.done():
                future.result()
        if time.monotonic() > deadline:
            waiting = [index for index, future in enumerate(receiving) if not future.done()]
            raise TimeoutError(f"engines {waiting} did not take a bucket of weights in {ENGINE_TIMEOUT:.0f} s")
        time.sleep(0.0005)
    work.wait()
    for future in receiving:
        future.result()


def host_address(engines: Sequence[EngineInfo]) -> str:
    """The address of this host that the engines can reach: the one used towards the first engine."""
    host, _, port = engines[0].url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port.partition("/")[0])), timeout=30.0) as connection:
        return connection.getsockname()[0]


def free_port(host: str) -> int:
    """A TCP port of `host` that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]
