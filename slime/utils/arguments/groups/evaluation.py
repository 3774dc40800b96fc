"""Flags: evaluation during training."""

from slime.utils.arguments.flag import Flag, FlagGroup, switch

GROUP = FlagGroup(
    "eval",
    "Evaluation",
    [
        Flag(
            "--eval-function-path", str, None, "Function that makes an evaluation. Default: --rollout-function-path."
        ),
        Flag("--eval-interval", int, None, "Rollouts between evaluations."),
        Flag("--eval-prompt-data", str, None, "name path [name path ...] of the evaluation data.", nargs="+"),
        Flag(
            "--eval-config",
            str,
            None,
            "YAML or JSON file with data sets and their settings; instead of --eval-prompt-data.",
        ),
        switch("--skip-eval-before-train", "Do not evaluate before the first step."),
        Flag("--eval-input-key", str, None, "Key of the prompt. Default: --input-key."),
        Flag("--eval-label-key", str, None, "Key of the label. Default: --label-key."),
        Flag("--eval-tool-key", str, None, "Key of the tools. Default: --tool-key."),
        Flag("--n-samples-per-eval-prompt", int, 1, "Responses per evaluation prompt."),
        Flag("--eval-temperature", float, None, "Sampling temperature; 0 is greedy. Default: --rollout-temperature."),
        Flag("--eval-top-p", float, None, "Nucleus sampling. Default: --rollout-top-p."),
        Flag("--eval-top-k", int, None, "Likeliest tokens to sample from. Default: --rollout-top-k."),
        Flag(
            "--eval-max-response-len", int, None, "Most tokens of one response. Default: --rollout-max-response-len."
        ),
        Flag("--eval-max-prompt-len", int, None, "Longer evaluation prompts are dropped."),
        Flag("--eval-min-new-tokens", int, None, "Fewest tokens of one response."),
        Flag(
            "--eval-max-context-len",
            int,
            None,
            "Total tokens, for custom functions. Default: --rollout-max-context-len.",
        ),
    ],
)
