"""A process group between one trainer rank and the devices of all engines, beside the trainer's own groups."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world


def join_group(
    backend: str, host: str, port: int, world_size: int, group_name: str, timeout: float
) -> dist.ProcessGroup:
    """Rank 0 of a new group; serves the rendezvous at host:port and returns when all others have joined.

    The others are SGLang servers (init_weights_update_group), whose key prefix and helper are used here too: torch has
    no public way to make a group with processes outside the default one. DistStoreError after `timeout` seconds.
    """
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(host, port, world_size, is_master=True, timeout=limit, multi_tenant=True)
    group, _ = _new_process_group_helper(
        world_size,
        0,
        [],
        Backend(backend),
        PrefixStore(group_name, store),
        group_name=group_name,
        backend_options=None,
        timeout=limit,
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
