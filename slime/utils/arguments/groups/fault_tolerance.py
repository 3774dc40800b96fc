"""Flags: what happens when an engine stops answering."""

from slime.utils.arguments.flag import Flag, FlagGroup, switch

GROUP = FlagGroup(
    "fault_tolerance",
    "Fault tolerance",
    [
        switch("--use-fault-tolerance", "Watch the engines and restart those that stop answering.", supported=False),
        Flag(
            "--rollout-health-check-interval", float, 30.0, "Seconds between two checks of an engine.", supported=False
        ),
        Flag(
            "--rollout-health-check-timeout", float, 30.0, "Seconds an engine has to answer a check.", supported=False
        ),
        Flag("--rollout-health-check-first-wait", float, 0.0, "Seconds before the first check.", supported=False),
    ],
)
