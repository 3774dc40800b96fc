"""Gets the run a Ray cluster that is large enough: joins the given one, or starts a private one on this machine.

Also the end: nothing this process started outlives `disconnect`.
"""

import logging
import os
import socket
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils

from slime.observability.quiet import quieten_driver

logger = logging.getLogger(__name__)

MANAGER_CPUS = 1
KILL_AFTER_S = 10.0  # longer than a server's supervisor needs


def connect(args: Namespace) -> None:
    """Joins args.ray_address or starts a local cluster; returns once it has the resources the run needs.

    Raises ConnectionError if the address does not answer, and ValueError with the arithmetic if the cluster is still
    too small after args.ray_startup_timeout seconds.
    """
    quieten_driver()
    with _keeping_sigterm_handler():
        if args.ray_address:
            _join(args.ray_address, args.ray_startup_timeout)
        else:
            _start_local(args)
    _wait_for_resources(args)


def disconnect() -> None:
    """Leaves the cluster, which ends every actor of this run, and waits until the processes below this one are gone.

    A local cluster ends with it. What is still there after 10 s is killed, by process id, and named in the log.
    """
    below = psutil.Process().children(recursive=True)
    ray.shutdown()
    _, alive = psutil.wait_procs(below, timeout=1.0)
    # Ray's agents and idle workers try to reach the head, which is gone, for a minute before they give up.
    _kill([process for process in alive if _belongs_to_ray(process)])
    _, alive = psutil.wait_procs(alive, timeout=KILL_AFTER_S)
    for process in alive:
        logger.warning("process %d (%s) did not end within %g s: killed", process.pid, _name(process), KILL_AFTER_S)
    _kill(alive)
    psutil.wait_procs(alive, timeout=KILL_AFTER_S)


def slots(args: Namespace) -> tuple[int, int]:
    """(slots of the placement group, index of the first rollout slot). A slot is a GPU, or a CPU without GPUs.

    Trainers sit on the first slots; engines follow them, or share them when colocated. One mode uses one side only.
    """
    actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    rollout = args.rollout_num_gpus or 0
    if args.debug_train_only or args.load_debug_rollout_data:
        return actor, 0
    if args.debug_rollout_only:
        return rollout, 0
    if args.colocate:
        return max(actor, rollout), 0
    return actor + rollout, actor


def explain_slots(args: Namespace) -> str:
    """The sum behind the number of slots, in the user's flags."""
    actor = (
        f"actor {args.actor_num_nodes * args.actor_num_gpus_per_node} "
        f"(--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node})"
    )
    rollout = f"rollout {args.rollout_num_gpus or 0} (--rollout-num-gpus)"
    if args.debug_train_only or args.load_debug_rollout_data:
        return actor
    if args.debug_rollout_only:
        return rollout
    if args.colocate:
        return f"the larger of {actor} and {rollout}"
    return f"{actor} + {rollout}"


@contextmanager
def _keeping_sigterm_handler() -> Iterator[None]:
    """ray.init takes SIGTERM for itself and exits wherever it is, half-way through its own start too (ray 2.60)."""
    original = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = original


def _join(address: str, timeout: float) -> None:
    """Connects to "host:port" or "auto". Ray itself tries a dead address for minutes, hence the look beforehand."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    deadline = time.monotonic() + timeout
    while host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(timeout, 10.0)).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"--ray-address {address}: no Ray cluster answers there ({error}) within {timeout:g} s; "
                    "start one with `ray start --head`, or leave the flag out for a private one"
                ) from error
            time.sleep(1.0)
    ray.init(address=address, configure_logging=False)


def _start_local(args: Namespace) -> None:
    """A cluster of this machine alone. Every port is bound to loopback, the dashboard is off.

    Ray binds to all interfaces on Linux unless clusters are switched off, by an environment variable named after the
    systems where that is the default. It is read when ray is imported and again by each of its processes, so both the
    variable and the value already read are set (ray 2.60).
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ.pop(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE, None)  # an empty --ray-address means a new cluster
    # CPUs are bookkeeping here, not cores: trainers and engines compute on the accelerator or take turns.
    cpus = max(os.cpu_count() or 1, slots(args)[0] + MANAGER_CPUS)
    gpus = {"num_gpus": 0} if args.accelerator == "cpu" else {}
    # Without an address ray joins what a stale /tmp/ray/ray_current_cluster names.
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, configure_logging=False, **gpus)


def _wait_for_resources(args: Namespace) -> None:
    kind = "GPU" if args.accelerator == "cuda" else "CPU"
    need = slots(args)[0] + (MANAGER_CPUS if kind == "CPU" else 0)
    deadline = time.monotonic() + (args.ray_startup_timeout if args.ray_address else 0)
    while True:
        have = int(ray.cluster_resources().get(kind, 0))
        if have >= need:
            return
        if time.monotonic() >= deadline:
            break
        logger.info("waiting for Ray nodes: need %d %ss, Ray has %d", need, kind, have)
        time.sleep(min(5.0, max(0.0, deadline - time.monotonic())))
    manager = " + 1 for the rollout manager" if kind == "CPU" else ""
    raise ValueError(
        f"need {need} {kind}s, Ray has {have}: {explain_slots(args)}{manager}.{_advice(args, need, have)}"
    )


def _advice(args: Namespace, need: int, have: int) -> str:
    if args.colocate or args.debug_train_only or args.debug_rollout_only or args.load_debug_rollout_data:
        return f" Start Ray with {need - have} more, or ask for fewer."
    actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.accelerator == "cuda" and max(actor, args.rollout_num_gpus or 0) <= have:
        return (
            f" Share them with --colocate, or lower --rollout-num-gpus to {have - actor}."
            if actor < have
            else " Share them with --colocate."
        )
    return f" Start Ray with {need - have} more, or ask for fewer."


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass  # it ended just now


def _belongs_to_ray(process: psutil.Process) -> bool:
    """An agent, or a worker that has no actor yet and so does not call itself ray::... yet."""
    try:
        command = " ".join(process.cmdline())
        return process.name().startswith("ray::") or "/ray/_private/workers/" in command
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "ended"
