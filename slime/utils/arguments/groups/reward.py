"""Flags: rewards, and the functions that turn samples into training data."""

from slime.utils.arguments.flag import Flag, FlagGroup, switch

GROUP = FlagGroup(
    "reward",
    "Rewards and sample processing",
    [
        Flag("--rm-type", str, None, "Built-in reward, such as math, deepscaler, dapo, exact, remote_rm."),
        Flag("--reward-key", str, None, "Key of the reward when it is a dict."),
        Flag("--eval-reward-key", str, None, "--reward-key of evaluations. Default: --reward-key."),
        switch("--group-rm", "Score a whole group at once."),
        Flag("--rm-url", str, None, "Address of a remote reward service."),
        Flag("--custom-rm-path", str, None, "Coroutine f(args, sample) that scores a sample."),
        Flag("--custom-reward-post-process-path", str, None, "Function f(args, samples) -> (raw rewards, rewards)."),
        Flag("--custom-convert-samples-to-train-data-path", str, None, "Function f(args, samples) -> training data."),
        Flag(
            "--rollout-sample-filter-path",
            str,
            None,
            "Function f(args, groups) that marks samples to leave out of the loss.",
        ),
        Flag(
            "--rollout-all-samples-process-path",
            str,
            None,
            "Function f(args, all_groups, data_source), filtered groups included.",
        ),
        Flag(
            "--loss-mask-type",
            str,
            "qwen",
            "Chat format for the loss masks of supervised training.",
            choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
        ),
        switch("--use-distributed-post", "Spread requests over actors on every node.", supported=False),
        Flag("--http-proxy", str, None, "Proxy for requests.", supported=False),
        Flag("--rollout-buffer-url", str, None, "Address of a rollout buffer service.", supported=False),
        Flag(
            "--fetch-trajectory-retry-times",
            int,
            -1,
            "Times to ask the rollout buffer for data; -1: for ever.",
            supported=False,
        ),
        Flag("--rollout-task-type", str, "math", "Task of the rollout buffer.", supported=False),
        Flag("--min-batch-collection-ratio", float, 1.0, "Part of a batch that suffices to go on.", supported=False),
    ],
)
