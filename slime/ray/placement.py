"""Where trainers and engines sit: an ordered part of a placement group."""

from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass(frozen=True)
class Placement:
    """Part of a placement group, in the order (node address, device). Unpacks as (pg, bundles, gpu_ids).

    bundles: index in pg of each slot. gpu_ids: physical device of each slot (CPU: its number on its node).
    nodes: address of each slot's node.
    """

    pg: PlacementGroup | None
    bundles: tuple[int, ...]
    gpu_ids: tuple[int | str, ...]
    nodes: tuple[str, ...]

    def __iter__(self):
        return iter((self.pg, self.bundles, self.gpu_ids))

    def __len__(self) -> int:
        return len(self.bundles)

    def part(self, start: int, length: int) -> "Placement":
        """`length` slots from slot `start` on."""
        span = slice(start, start + length)
        return Placement(self.pg, self.bundles[span], self.gpu_ids[span], self.nodes[span])

    def strategy(self, slot: int) -> PlacementGroupSchedulingStrategy:
        """Ray's option that pins an actor to a slot."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.pg,
            placement_group_bundle_index=self.bundles[slot],
            placement_group_capture_child_tasks=False,
        )
