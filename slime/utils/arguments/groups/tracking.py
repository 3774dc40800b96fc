"""Flags: metrics, Weights & Biases, TensorBoard and the progress display."""

from slime.utils.arguments.flag import Flag, FlagGroup, off, switch

GROUP = FlagGroup(
    "tracking",
    "Metrics and progress",
    [
        Flag("--metrics-jsonl", str, None, "File that gets one JSON object of metrics per step."),
        Flag("--progress", str, "auto", "Progress display.", choices=("auto", "rich", "plain", "none")),
        switch("--use-wandb", "Log to Weights & Biases."),
        Flag(
            "--wandb-mode",
            str,
            None,
            "Mode of Weights & Biases; wins over WANDB_MODE.",
            choices=("online", "offline", "disabled"),
        ),
        Flag("--wandb-dir", str, None, "Directory of the files of Weights & Biases."),
        Flag("--wandb-key", str, None, "API key of Weights & Biases."),
        Flag("--wandb-host", str, None, "Server of Weights & Biases."),
        Flag("--wandb-team", str, None, "Team of Weights & Biases."),
        Flag("--wandb-group", str, None, "Group of the run in Weights & Biases."),
        Flag("--wandb-project", str, None, "Project in Weights & Biases."),
        Flag("--wandb-run-id", str, None, "Id of a run in Weights & Biases to continue."),
        off("--disable-wandb-random-suffix", "wandb_random_suffix", "Do not add a random suffix to the group."),
        switch("--wandb-always-use-train-step", "Count steps in optimizer steps everywhere."),
        switch("--log-multi-turn", "Log lengths with and without inserted tokens, and rounds, as multi_turn/*."),
        switch("--log-passrate", "Log pass@k of rollouts and evaluations; an answer is right when its reward is 1."),
        Flag("--log-reward-category", str, None, "Key in reward dicts whose values are counted."),
        switch("--log-correct-samples", "Log the lengths of correct samples.", supported=False),
        switch("--use-tensorboard", "Log to TensorBoard."),
        Flag("--tb-project-name", str, None, "Project directory of TensorBoard."),
        Flag("--tb-experiment-name", str, None, "Experiment directory of TensorBoard."),
    ],
)
