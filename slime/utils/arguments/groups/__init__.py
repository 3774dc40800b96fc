"""The tables of slime's own flags, in the order in which `--help` shows them."""

from slime.utils.arguments.flag import FlagGroup
from slime.utils.arguments.groups import (
    algorithm,
    cluster,
    data,
    debug,
    distillation,
    engine,
    evaluation,
    fault_tolerance,
    megatron_extra,
    plan,
    reward,
    rollout,
    tracking,
    train,
)

GROUPS: tuple[FlagGroup, ...] = tuple(
    module.GROUP
    for module in (
        cluster,
        data,
        rollout,
        reward,
        algorithm,
        train,
        evaluation,
        engine,
        tracking,
        debug,
        megatron_extra,
        fault_tolerance,
        distillation,
        plan,
    )
)
