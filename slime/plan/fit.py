"""Whether the device memory lasts: what a GPU holds in each phase of a step, beside what it has."""

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from slime.plan.engine_memory import EngineMemory, engine_memory
from slime.plan.engines import Engine, EngineMap
from slime.plan.memory import SLEEPING_ENGINE, SLEEPING_TRAINER, RankMemory
from slime.utils.model_shape import ModelShape

GIB = 2**30
# What torch sees of the memory a GPU is sold with, counted in GiB: 79.1 of an H100's 80, 139.8 of an H200's 141.
VISIBLE = 0.985
_NAMED = {"fp8": "fp8", "int4": "w4afp8", "w4a16": "w4afp8"}  # word in a checkpoint's name -> SGLang's method


@dataclass(frozen=True)
class GroupMemory:
    """Memory of the engines of one group, which are all alike. shared: some of them share GPUs with trainers."""

    group: int
    name: str
    engines: int
    shared: bool
    memory: EngineMemory


@dataclass(frozen=True)
class Phase:
    """The fullest GPU in one phase. where: which GPUs that are. parts: (what, bytes), which add up to `bytes`.

    certain: no part rests on an assumption about a checkpoint that is not on this machine.
    """

    name: str
    where: str
    parts: tuple[tuple[str, int], ...]
    available: int
    certain: bool

    @property
    def bytes(self) -> int:
        """What the phase needs."""
        return sum(size for _, size in self.parts)

    @property
    def fits(self) -> bool:
        """Whether a GPU has as much."""
        return self.bytes <= self.available


def visible_memory(gpu_memory_gb: float) -> int:
    """Bytes that a process finds on a GPU sold with `gpu_memory_gb`."""
    return int(gpu_memory_gb * GIB * VISIBLE)


def unseen_quantization(a: Namespace) -> tuple[str | None, str]:
    """(what --hf-checkpoint is taken to be quantized as, a sentence on it) when its config.json cannot tell.

    (None, "") when it is there, or --sglang-quantization says it.
    """
    if a.hf_config is not None or a.sglang_quantization or not a.hf_checkpoint:
        return None, ""
    name = PurePath(a.hf_checkpoint).name
    found = next(
        (method for word, method in _NAMED.items() if re.search(rf"(?i)(^|[-_.]){word}($|[-_.])", name)), None
    )
    as_what = f"{found}, as its name says" if found else f"unquantized, {4 if a.fp32 else 2} bytes a number"
    where = f"{a.hf_checkpoint} has no config.json on this machine (--plan-hf-config names another)"
    return found, f"{where}: engines are planned as if it were {as_what}"


def generation_memory(
    a: Namespace, engines: EngineMap, shape: ModelShape, available: int
) -> tuple[tuple[GroupMemory, ...], tuple[str, ...]]:
    """(memory of every group that serves the trained model, names of groups that serve another one)."""
    found, others = [], []
    quantization, _ = unseen_quantization(a)
    assumed = {"quantization": quantization} if quantization else {}
    for group, (model, servers) in enumerate(engines.topology.groups):
        mine: list[Engine] = [engine for engine in engines.engines if engine.group == group]
        if not mine:
            continue
        name = f"{model.name} ({servers.worker_type})"
        if not model.update_weights or servers.worker_type == "encoder":
            others.append(name)
            continue
        p = mine[0].parallel
        sizes = {"tp_size": p.tp, "pp_size": p.pp, "dp_size": p.dp, "ep_size": p.ep}
        memory = engine_memory(a, available, shape=shape, overrides={**assumed, **servers.overrides, **sizes})
        found.append(GroupMemory(group, name, len(mine), any(engine.shares_trainer_gpus for engine in mine), memory))
    return tuple(found), tuple(others)


def phases(a: Namespace, ranks: Sequence[RankMemory], groups: Sequence[GroupMemory], available: int) -> list[Phase]:
    """Training, weight update and generation, as far as the run has them; for each the GPUs that need most.

    available: bytes of one GPU. Trainers and engines that share GPUs hold memory side by side; --offload-rollout
    leaves a sleeping engine in training, --offload-train a sleeping trainer in generation. An engine needs its
    weights, the cache of one request of full length, and the share that its memory fraction leaves to graphs and
    activations. A critic is taken to be as large as the actor; while that works, it is asleep or holds what stays.
    Empty on a CPU, whose memory is the host's.
    """
    if a.accelerator == "cpu":
        return []
    shared = [group.memory for group in groups if group.shared]
    seen = not unseen_quantization(a)[1]
    found = [_training(a, ranks, shared, available)] if ranks else []
    if ranks and groups:
        found.append(_update(a, ranks, shared, available, seen or not shared))
    for group in groups:
        m = group.memory
        request = m.context * m.kv_per_token + m.state_per_request
        rest = round((1 - m.mem_fraction) * available)
        parts = [("weights", m.weights), ("full_request", request), ("graphs_and_activations", rest)]
        if group.shared and ranks:
            beside = SLEEPING_TRAINER if a.offload_train else max(rank.resident + rank.reserve for rank in ranks)
            parts.append(("trainer_beside", beside))
            parts += _critic_beside(a, ranks)
        found.append(Phase("generation", f"engines of {group.name}", tuple(parts), available, seen))
    return found


def stage_parts(rank: RankMemory) -> tuple[tuple[str, int], ...]:
    """The parts of a training step on the GPUs of one pipeline stage."""
    return (
        ("weights", rank.weights),
        ("gradients", rank.gradients),
        ("optimizer", rank.optimizer),
        ("step", rank.step_peak),
        ("reserve", rank.reserve),
    )


def _training(a: Namespace, ranks: Sequence[RankMemory], shared: Sequence[EngineMemory], available: int) -> Phase:
    fullest = max(ranks, key=lambda rank: rank.training)
    parts = stage_parts(fullest)
    if shared and not a.offload_rollout:  # the reserve counts a sleeping engine
        parts += (("engine_beside", max(engine.static for engine in shared) - SLEEPING_ENGINE),)
    return Phase("training", f"pipeline stage {fullest.pp_rank}", parts + _critic_beside(a, ranks), available, True)


def _critic_beside(a: Namespace, ranks: Sequence[RankMemory]) -> tuple[tuple[str, int], ...]:
    """What the critic keeps on a GPU while others work there; nothing without a critic."""
    if not a.use_critic:
        return ()
    return (("critic_beside", SLEEPING_TRAINER if a.offload_train else max(rank.resident for rank in ranks)),)


def _update(
    a: Namespace, ranks: Sequence[RankMemory], shared: Sequence[EngineMemory], available: int, certain: bool
) -> Phase:
    fullest = max(ranks, key=lambda rank: rank.resident + rank.weight_sync)
    parts = (("trainer", fullest.resident), ("buckets", fullest.weight_sync), ("reserve", fullest.reserve))
    if shared:
        parts += (("engine_weights", max(engine.weights for engine in shared)),)
    where = f"pipeline stage {fullest.pp_rank}"
    return Phase("weight update", where, parts + _critic_beside(a, ranks), available, certain)
