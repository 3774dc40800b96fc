"""Which GPU slots each engine takes: the groups of servers line up one after the other, engine by engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from slime.utils.layout.errors import LayoutError


@dataclass(frozen=True)
class GroupSize:
    """What placement needs of a group of servers. engines: whether it starts any, or only keeps the GPUs free."""

    name: str
    num_gpus: int
    num_gpus_per_engine: int
    engines: bool = True


@dataclass(frozen=True)
class PlacedEngine:
    """rank: among all engines of the run. group: index of its group. nodes: its slots on each of its nodes."""

    rank: int
    group: int
    nodes: tuple[range, ...]

    @property
    def slots(self) -> range:
        """All its slots."""
        return range(self.nodes[0].start, self.nodes[-1].stop)


def place_engines(
    groups: Sequence[GroupSize],
    first_slot: int,
    gpus_per_node: int,
    whole_nodes: bool = True,
    size_key: str = "--rollout-num-gpus-per-engine",
) -> tuple[PlacedEngine, ...]:
    """The engines of all groups, from `first_slot` on. Groups without engines take slots and ranks all the same.

    Slot s is GPU s % gpus_per_node of node s // gpus_per_node. whole_nodes: an engine's part on a node must not reach
    into the next (SGLang counts GPUs upwards on one node). size_key: what the user calls an engine's size. Raises
    LayoutError if engines do not fit in or line up.
    """
    if gpus_per_node < 1:
        raise LayoutError(("--num-gpus-per-node",), f"is {gpus_per_node}, must be >= 1", "--num-gpus-per-node 8")
    placed, slot, rank = [], first_slot, 0
    for index, group in enumerate(groups):
        if wrong := _does_not_fit(group, gpus_per_node):
            raise _error(group, size_key, wrong, gpus_per_node, slot)
        each = group.num_gpus_per_engine
        on_node = min(each, gpus_per_node)
        for start in range(slot, slot + group.num_gpus, each):
            nodes = tuple(range(begin, begin + on_node) for begin in range(start, start + each, on_node))
            if group.engines:
                wrong = _does_not_line_up(nodes, gpus_per_node, first_slot) if whole_nodes else ""
                if wrong:
                    raise _error(group, size_key, wrong, gpus_per_node, slot)
                placed.append(PlacedEngine(rank, index, nodes))
            rank += 1
        slot += group.num_gpus
    return tuple(placed)


def _does_not_fit(group: GroupSize, gpus_per_node: int) -> str:
    each = group.num_gpus_per_engine
    if each < 1 or group.num_gpus < 0:
        return f"{group.num_gpus} GPUs, {each} of them an engine; both must be >= 1"
    if group.num_gpus % each:
        return f"{group.num_gpus} GPUs make no whole engines of {each}"
    if each % min(each, gpus_per_node):
        return f"{each} GPUs do not fill whole nodes of {gpus_per_node} (--num-gpus-per-node)"
    return ""


def _does_not_line_up(nodes: Sequence[range], gpus_per_node: int, first_slot: int) -> str:
    for slots in nodes:
        first, last = slots.start // gpus_per_node, (slots.stop - 1) // gpus_per_node
        if first != last:
            return (
                f"an engine would take GPUs {slots.start} to {slots.stop - 1} of the run, which lie on nodes {first} "
                f"and {last} of {gpus_per_node} GPUs each (the first engine starts at GPU {first_slot})"
            )
    return ""


def _error(group: GroupSize, size_key: str, says: str, gpus_per_node: int, slot: int) -> LayoutError:
    legal = _legal(group.num_gpus, gpus_per_node, group.num_gpus_per_engine, slot)
    return LayoutError((size_key.split()[0],), f"{group.name}: {says}", f"{size_key} {legal}")


def _legal(total: int, gpus_per_node: int, at_most: int, start: int) -> int:
    """The largest engine up to `at_most` GPUs that fills `total`, and nodes or a part of one, from slot `start`."""
    for each in range(min(at_most, total), 0, -1):
        whole = each % gpus_per_node == 0 or gpus_per_node % each == 0
        if total % each == 0 and whole and start % min(each, gpus_per_node) == 0:
            return each
    return 1
