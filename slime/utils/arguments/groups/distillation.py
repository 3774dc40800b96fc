"""Flags: on-policy distillation."""

from slime.utils.arguments.flag import Flag, FlagGroup, switch

GROUP = FlagGroup(
    "distillation",
    "On-policy distillation",
    [
        switch("--use-opd", "Distil from a teacher on the policy's own samples.", supported=False),
        Flag("--opd-type", str, None, "Where the teacher runs.", choices=("sglang", "megatron"), supported=False),
        Flag("--opd-kl-coef", float, 1.0, "Weight of the divergence to the teacher.", supported=False),
        Flag("--opd-teacher-load", str, None, "Checkpoint of a Megatron teacher.", supported=False),
        Flag("--opd-teacher-ckpt-step", int, None, "Iteration of the teacher's checkpoint.", supported=False),
    ],
)
