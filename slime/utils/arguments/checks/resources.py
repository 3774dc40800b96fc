"""Rules of GPUs, engines and offloading."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.flag import Problem
from slime.utils.arguments.upstream import OWNED_SGLANG_FIELDS
from slime.utils.layout.divisors import divisors
from slime.utils.layout.errors import LayoutError
from slime.utils.sglang_config import TopologyError, topology


def check_modes(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The two halves of the loop cannot both be left out."""
    if a.debug_rollout_only and a.debug_train_only:
        cause = given.get("load_debug_rollout_data", "--debug-train-only")
        yield Problem(("--debug-rollout-only", cause), "nothing would be left to run; give one of the two")


def check_offload(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Offloading gives GPU memory back; there is none on a CPU."""
    if a.accelerator != "cpu":
        return
    for name in ("offload", "offload_train", "offload_rollout"):
        if name in given and getattr(a, name):
            says = "moves GPU memory, and this run is on a CPU (--accelerator cpu); leave it out"
            yield Problem((given[name],), says)


def check_distributed_backend(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Collectives run where the tensors are."""
    backend = {"cuda": "nccl", "cpu": "gloo"}[a.accelerator]
    if a.distributed_backend != backend:
        says = f"{a.distributed_backend} is not supported with --accelerator {a.accelerator}"
        yield Problem(("--distributed-backend",), says, f"--distributed-backend {backend}")


def check_rollout_gpus(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The engines have GPUs, and whole engines fit into them."""
    if a.debug_train_only:
        return
    if a.rollout_num_gpus is None:
        says = "is not given, and without --colocate the engines need GPUs of their own"
        legal = f"--colocate, or --rollout-num-gpus {a.rollout_num_gpus_per_engine}"
        yield Problem(("--rollout-num-gpus",), says, legal)
        return
    total, each, node = a.rollout_num_gpus, a.rollout_num_gpus_per_engine, a.num_gpus_per_node
    if min(each, node) < 1:
        return  # a range problem, reported as such
    if total % each:
        says = f"{total} GPUs do not make whole engines of {each} (--rollout-num-gpus-per-engine)"
        legal = max(each, total // each * each)
        yield Problem(("--rollout-num-gpus",), says, f"--rollout-num-gpus {legal}")
    fits = [d for d in divisors(total) if d <= each and (d % node == 0 or node % d == 0)]
    legal = f"--rollout-num-gpus-per-engine {max(fits, default=1)}"
    if each > node and each % node:
        says = f"{each} GPUs do not fill whole nodes of {node} (--num-gpus-per-node)"
        yield Problem(("--rollout-num-gpus-per-engine",), says, legal)
    if each < node < total and node % each:
        says = f"an engine of {each} GPUs would straddle two nodes of {node} (--num-gpus-per-node)"
        yield Problem(("--rollout-num-gpus-per-engine",), says, legal)


def check_shared_gpus(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Trainers sit on whole nodes; colocated engines sit where trainers are, whose memory they open."""
    if a.debug_rollout_only or min(a.actor_num_nodes, a.actor_num_gpus_per_node, a.num_gpus_per_node) < 1:
        return
    trainers, node = a.actor_num_nodes * a.actor_num_gpus_per_node, a.num_gpus_per_node
    if a.accelerator == "cuda" and a.actor_num_gpus_per_node > node:
        says = f"{a.actor_num_gpus_per_node} training GPUs on a node of {node} (--num-gpus-per-node)"
        legal = f"--num-gpus-per-node {a.actor_num_gpus_per_node}"
        yield Problem(("--actor-num-gpus-per-node",), says, legal)
    if a.debug_train_only or not a.colocate or a.rollout_num_gpus is None:
        return
    if a.rollout_num_gpus > trainers:
        made = f"--actor-num-nodes {a.actor_num_nodes} x --actor-num-gpus-per-node {a.actor_num_gpus_per_node}"
        says = f"{a.rollout_num_gpus} with --colocate is more than the {trainers} GPUs with trainers ({made})"
        yield Problem(("--rollout-num-gpus",), says, f"--rollout-num-gpus {trainers}")
    elif a.rollout_num_gpus_per_engine > trainers:
        says = f"an engine of {a.rollout_num_gpus_per_engine} GPUs is larger than the {trainers} GPUs of --colocate"
        yield Problem(("--rollout-num-gpus-per-engine",), says, f"--rollout-num-gpus-per-engine {trainers}")


def check_topology(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The engines, as --sglang-config, --prefill-num-servers or sizes describe them, take GPUs that lie together."""
    if a.rollout_num_gpus is None or min(a.rollout_num_gpus_per_engine, a.num_gpus_per_node) < 1:
        return
    plain = a.sglang_config is None and a.prefill_num_servers is None
    if plain and any(check_rollout_gpus(a, given)):
        return
    fields = {name.removeprefix("sglang_") for name in vars(a) if name.startswith("sglang_")}
    try:
        engines = topology(a, fields | OWNED_SGLANG_FIELDS.keys())
        first = 0 if a.colocate or a.debug_rollout_only else a.actor_num_nodes * a.actor_num_gpus_per_node
        engines.place(first, a.num_gpus_per_node, whole_nodes=a.accelerator == "cuda")
    except TopologyError as error:
        for problem in error.problems:
            yield Problem(problem.flags, problem.says, problem.try_)
    except LayoutError as error:
        yield Problem(error.flags, error.says, error.try_)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        yield Problem(("--sglang-config",), f"{a.sglang_config}: {reason}", kind="absent")


def check_weight_transport(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Weights that travel through a directory need one, and some ways of travelling need the directory."""
    transport, mode = "--update-weight-transport", "--update-weight-mode"
    if a.update_weight_transport == "disk" and a.update_weight_disk_dir is None:
        says = "disk needs a directory that trainers and engines share"
        yield Problem((transport,), says, "--update-weight-disk-dir /shared/weights")
    if a.update_weight_mode == "delta":
        if a.update_weight_transport != "disk":
            says = f"delta publishes files, and {transport} is {a.update_weight_transport}"
            yield Problem((mode,), says, f"{transport} disk --update-weight-disk-dir /shared/weights")
        if a.colocate:
            says = "engines on the trainers' GPUs read the weights themselves, not their changes"
            yield Problem((mode, "--colocate"), says, f"{mode} full")
        if a.update_weight_local_checkpoint_dir is None:
            says = "delta needs a directory on each engine's host for the weights that the changes apply to"
            yield Problem((mode,), says, "--update-weight-local-checkpoint-dir /local/weights")
    if a.release_train:
        yield from _check_release(a)


def _check_release(a: Namespace) -> Iterator[Problem]:
    """Trainers that end after each step come back from a checkpoint, and send their weights as files."""
    flag = "--release-train"
    if a.save is None:
        says = "rebuilds the trainers from a checkpoint, and --save is not given"
        yield Problem((flag,), says, "--save checkpoints")
    if a.update_weight_mode != "full" or a.update_weight_transport != "disk":
        says = f"needs full weights as files, not {a.update_weight_mode} over {a.update_weight_transport}"
        legal = "--update-weight-mode full --update-weight-transport disk --update-weight-disk-dir /shared/weights"
        yield Problem((flag,), says, legal)
    if a.use_critic or a.keep_old_actor:
        other = "--advantage-estimator" if a.use_critic else "--keep-old-actor"
        yield Problem((flag, other), "what is kept between steps would be lost; leave one of the two out")


def check_time_outs(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A wait lasts longer than nothing."""
    for name in (
        "engine_start_timeout",
        "ray_startup_timeout",
        "rollout_stall_timeout",
        "distributed_timeout_minutes",
    ):
        if getattr(a, name) <= 0:
            yield Problem((given.get(name, name),), f"is {getattr(a, name):g}, must be > 0")


CHECKS = (
    check_modes,
    check_offload,
    check_distributed_backend,
    check_rollout_gpus,
    check_shared_gpus,
    check_topology,
    check_weight_transport,
    check_time_outs,
)
