"""Weights to engines on the same devices: CUDA IPC handles of flattened buckets; on the CPU the values themselves."""

import base64
import io
import pickle
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from slime.backends.megatron_utils.update_weight.base import Sent, WeightUpdater
from slime.backends.megatron_utils.update_weight.buckets import Bucket, flatten
from slime.backends.megatron_utils.update_weight.common import agree, hf_buckets, is_weight_source
from slime.utils.engine_client import EngineInfo


class UpdateWeightFromTensor(WeightUpdater):
    """For --colocate. Engine devices are the train ranks' own: engine e uses ranks gpu_offset .. + num_gpus - 1.

    CUDA: every rank holds the whole bucket on its device (TP gather, then a broadcast from the pipeline stage that
    owns it) and its engine opens the memory of its own device. CPU: the sources of the pipeline stages send in turn.
    """

    def __init__(self, args: Namespace, model_chunks: Sequence[torch.nn.Module]):
        super().__init__(args, model_chunks)
        self.on_cuda = args.accelerator == "cuda"
        self._my_engine: int | None = None
        self._group: dist.ProcessGroup | None = None

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Collective. ValueError when a colocated engine spans devices that no train rank owns."""
        super().connect(engines)
        if not self.on_cuda:
            return
        for index, engine in enumerate(engines):
            last = engine.gpu_offset + engine.num_gpus
            if last > dist.get_world_size():
                raise ValueError(
                    f"engine {engine.rank} at {engine.url} uses devices {engine.gpu_offset}..{last - 1}, but only the "
                    f"{dist.get_world_size()} training devices can share memory; "
                    f"set --rollout-num-gpus {dist.get_world_size()} or leave --colocate out"
                )
            ranks = list(range(engine.gpu_offset, last))
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                self._my_engine, self._group = index, group

    def send(self) -> Sent:
        """All buckets of all pipeline stages."""
        return self._send_ipc() if self.on_cuda else self._send_values()

    def _send_values(self) -> Sent:
        sent = Sent()
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            agree(self._send_stage_values, stage, sent)
        return sent

    def _send_stage_values(self, stage: int, sent: Sent) -> None:
        if stage != mpu.get_pipeline_model_parallel_rank() or not is_weight_source(with_peers=True):
            return
        for bucket in hf_buckets(self.args, self.model_chunks, self.args.update_weight_buffer_size):
            if is_weight_source():
                payload = serialize_values(bucket)
                self._post_values(payload)
                sent.add(len(payload) * len(self.clients), len(self.clients))

    def _post_values(self, payload: str) -> None:
        version = str(self.weight_version)
        sizes = {client.url: engine.num_gpus for client, engine in zip(self.clients, self.engines, strict=True)}
        self.on_all_engines(
            lambda client: client.update_weights_from_tensor([payload] * sizes[client.url], None, version)
        )

    def _send_ipc(self) -> Sent:
        sent = Sent()
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            for bucket in self._stage_buckets(stage):
                agree(self._send_handles, bucket, sent)
                torch.cuda.ipc_collect()
        return sent

    def _stage_buckets(self, stage: int) -> Iterator[Bucket]:
        """The buckets of one pipeline stage, on every rank's device."""
        pp_rank, group = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_group()
        limit = self.args.update_weight_buffer_size
        own = iter(hf_buckets(self.args, self.model_chunks, limit)) if stage == pp_rank else None
        source = dist.get_global_rank(group, stage)
        while True:
            bucket = next(own, None) if own is not None else None
            layout = [bucket and [(name, tensor.shape, tensor.dtype) for name, tensor in bucket]]
            dist.broadcast_object_list(layout, src=source, group=group)
            if layout[0] is None:
                return
            sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in layout[0]]
            # a new buffer a bucket: the engine may still be copying from the last one
            buffer = flatten(bucket) if bucket else torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
            dist.broadcast(buffer, src=source, group=group)
            parts = buffer.split(sizes)
            yield [(n, part.view(d).view(s)) for (n, s, d), part in zip(layout[0], parts, strict=True)]

    def _send_handles(self, bucket: Bucket, sent: Sent) -> None:
        if self._group is None:
            return
        handle = serialize_ipc(bucket)
        leader = dist.get_rank(self._group) == 0
        handles: list[str | None] | None = [None] * self._group.size() if leader else None
        dist.gather_object(handle, handles, group=self._group, group_dst=0)
        if leader:
            client = self.clients[self._my_engine]
            client.update_weights_from_tensor(handles, "flattened_bucket", str(self.weight_version))
            sent.add(sum(tensor.nbytes for _, tensor in bucket), 1)
        dist.barrier(self._group)


def serialize_values(bucket: Bucket) -> str:
    """The (name, tensor) pairs with their values, base64. Shared memory would tie the engine to this process."""
    buffer = io.BytesIO()
    _ValuePickler(buffer, protocol=4).dump([(name, tensor.detach().cpu()) for name, tensor in bucket])
    return base64.b64encode(buffer.getvalue()).decode()


class _ValuePickler(pickle.Pickler):
    """Writes a tensor as its bytes, dtype and shape, in terms of torch and builtins alone.

    torch's own reduction names torch.storage._load_from_bytes, which Megatron replaces by a function of its own: an
    engine's restricted unpickler refuses that.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if obj.dim() != 1:
            return torch.reshape, (obj.flatten(), tuple(obj.shape))
        values = bytearray(obj.contiguous().view(torch.uint8).numpy())
        return partial(torch.frombuffer, dtype=obj.dtype), (values,)


def serialize_ipc(bucket: Bucket) -> str:
    """Handle of a flattened copy of the bucket in this device's memory, in SGLang's own format."""
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()  # devices by UUID: the engine may number them differently
    flat = FlattenedTensorBucket(named_tensors=bucket)
    content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return MultiprocessingSerializer.serialize(content, output_str=True)
