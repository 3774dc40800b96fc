"""Flags: the plan of a run, printed instead of starting it."""

from slime.utils.arguments.flag import Flag, FlagGroup, switch

GROUP = FlagGroup(
    "plan",
    "Plan: what the run would do, without starting it",
    [
        switch(
            "--dry-run",
            "Print the plan and end, with code 0 if the run can start, else 2. Needs no GPU, no Ray and no weights.",
        ),
        Flag("--plan-gpu-memory-gb", float, 80.0, "Memory that one GPU is sold with (H100 80, H200 141), in GB."),
        Flag(
            "--plan-hf-config",
            str,
            None,
            "config.json that the plan uses where --hf-checkpoint is not on this machine.",
        ),
        Flag(
            "--plan-network-gb-per-s",
            float,
            50.0,
            "Network of one GPU in GB/s, for the plan's estimate of how long a weight update takes.",
        ),
        Flag("--plan-json", str, None, "Write the plan as JSON to this file, - for standard output."),
    ],
)
