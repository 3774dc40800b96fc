"""Rules of GPUs, engines and offloading."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.flag import Problem


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
        yield Problem(
            ("--rollout-num-gpus",), says, f"--colocate, or --rollout-num-gpus {a.rollout_num_gpus_per_engine}"
        )
        return
    total, each, node = a.rollout_num_gpus, a.rollout_num_gpus_per_engine, a.num_gpus_per_node
    if min(each, node) < 1:
        return  # a range problem, reported as such
    if total % each:
        says = f"{total} GPUs do not make whole engines of {each} (--rollout-num-gpus-per-engine)"
        legal = max(each, total // each * each)
        yield Problem(("--rollout-num-gpus",), says, f"--rollout-num-gpus {legal}")
    if each > node and each % node:
        says = f"{each} GPUs do not fill whole nodes of {node} (--num-gpus-per-node)"
        yield Problem(("--rollout-num-gpus-per-engine",), says, f"--rollout-num-gpus-per-engine {each // node * node}")
    if each < node < total and node % each:
        legal = next(d for d in range(each, 0, -1) if node % d == 0)
        says = f"an engine of {each} GPUs would straddle two nodes of {node} (--num-gpus-per-node)"
        yield Problem(("--rollout-num-gpus-per-engine",), says, f"--rollout-num-gpus-per-engine {legal}")


def check_engine_parallel(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """An engine's GPUs are its tensor-parallel x pipeline-parallel ranks."""
    each, pp, dp = a.rollout_num_gpus_per_engine, a.sglang_pp_size, a.sglang_dp_size
    if pp > 1 and each % pp:
        legal = next(d for d in range(min(each, pp), 0, -1) if each % d == 0)
        says = f"{pp} does not divide the {each} GPUs of an engine (--rollout-num-gpus-per-engine)"
        yield Problem(("--sglang-pp-size",), says, f"--sglang-pp-size {legal}")
    if dp > 1 and not a.sglang_enable_dp_attention:
        says = f"{dp} inside one engine means data-parallel attention"
        yield Problem(("--sglang-dp-size",), says, "--sglang-enable-dp-attention")


def check_weight_transport(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Weights that travel through a directory need one."""
    if a.update_weight_transport == "disk" and a.update_weight_disk_dir is None:
        says = "disk needs a directory that trainers and engines share"
        yield Problem(("--update-weight-transport",), says, "--update-weight-disk-dir /shared/weights")


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
    check_engine_parallel,
    check_weight_transport,
    check_time_outs,
)
