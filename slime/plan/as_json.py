"""A plan as JSON: the same facts as the printed one, with every process group, under a schema that has a version."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from slime.plan.fit import Phase, stage_parts
from slime.plan.memory import HostMemory, RankMemory
from slime.plan.ranks import KINDS, RankGrid
from slime.utils.arguments.flag import Problem

if TYPE_CHECKING:
    from slime.plan.engines import EngineMap
    from slime.plan.plan import Plan

SCHEMA_VERSION = 1  # raised when a key is renamed, removed or changes its meaning; new keys alone do not raise it


def to_json(plan: "Plan") -> dict[str, Any]:
    """The plan as JSON values. Sizes are bytes, layers and ranks count from 0; a part that is not known is null."""
    return {
        "version": SCHEMA_VERSION,
        "verdict": plan.verdict,
        "exit_code": plan.exit_code,
        "reasons": list(plan.reasons),
        "problems": [_problem(p) for p in (*plan.problems, *plan.unsupported, *plan.absent)],
        "notices": list(plan.notices),
        "differences": list(plan.differences),
        "not_computed": dict(plan.not_computed),
        "assumptions": plain(plan.assumptions),
        "cluster": plain(plan.cluster),
        "model": plain(plan.model),
        "parallel": None if plan.grid is None else _parallel(plan.grid, plan.model.experts if plan.model else 0),
        "context_parallel": plain(plan.context_parallel),
        "stages": plain(plan.stages),
        "training": {"tokens_per_gpu": plan.tokens, "stages": [_rank(rank) for rank in plan.training]},
        "engines": None if plan.engines is None else _engines(plan.engines),
        "generation": plain(plan.generation),
        "phases": [_phase(phase) for phase in plan.phases],
        "host": None if plan.host is None else _host(plan.host),
        "batch": plain(plan.batch),
        "weight_sync": plain(plan.weight_sync),
        "checkpoint": plain(plan.checkpoint),
    }


def _problem(problem: Problem) -> dict[str, Any]:
    return {"kind": problem.kind, "flags": list(problem.flags), "says": problem.says, "try": problem.try_}


def _parallel(grid: RankGrid, experts: int) -> dict[str, Any]:
    """experts_of_ep_rank: first and last routed expert of each expert-parallel rank."""
    held = [grid.local_experts(experts, rank) for rank in range(grid.ep)] if experts >= grid.ep else []
    return {
        "world_size": grid.world_size,
        "sizes": grid.sizes,
        "experts_of_ep_rank": [[span[0], span[-1]] for span in held],
        "groups": {kind: plain(grid.groups(kind)) for kind in KINDS},
    }


def _rank(rank: RankMemory) -> dict[str, Any]:
    parts = {name: size for name, size in stage_parts(rank)}
    host = {"optimizer": rank.host_optimizer, "replicas": rank.host_replicas, "offload": rank.host_offload}
    return {
        "pp_rank": rank.pp_rank,
        "parameters": rank.parameters.total(),
        "parts": parts,
        "peak": sum(parts.values()),
        "micro_batches_in_flight": round(rank.activations.in_flight, 4),
        "activations_of_a_micro_batch": rank.activations.micro_batch,
        "weight_sync": rank.weight_sync,
        "host": host,
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "where": phase.where,
        "parts": dict(phase.parts),
        "bytes": phase.bytes,
        "available": phase.available,
        "fits": phase.fits,
    }


def _host(host: HostMemory) -> dict[str, Any]:
    return {**plain(host), "total": host.total}


def _engines(engines: "EngineMap") -> dict[str, Any]:
    return {
        "gpus": engines.total_slots,
        "first_gpu": engines.first_slot,
        "external": list(engines.external),
        "routers": plain(engines.routers),
        "engines": [
            {
                "rank": engine.rank,
                "model": engine.model,
                "worker_type": engine.worker_type,
                "update_weights": engine.update_weights,
                "shares_trainer_gpus": engine.shares_trainer_gpus,
                "parallel": plain(engine.parallel),
                "nodes": [
                    {
                        "node_rank": node.node_rank,
                        "node": node.node,
                        "gpus": list(node.gpus),
                        "slots": list(node.slots),
                    }
                    for node in engine.nodes
                ],
            }
            for engine in engines.engines
        ],
    }


def plain(value: Any) -> Any:
    """Dataclasses as objects, tuples and ranges as arrays; numbers, texts, None and mappings as they are."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name.rstrip("_"): plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return value


def dumps(value: Any) -> str:
    """JSON text with two blanks of indentation, in which arrays without objects take one line."""
    return _text(value, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        lines = (f"{inner}{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{outer}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(inner + _text(item, depth + 1) for item in value) + f"\n{outer}]"
    return json.dumps(value, ensure_ascii=False)
