"""Flags: where prompts come from and how they become batches."""

from slime.utils.arguments.flag import Flag, FlagGroup, json_object, off, switch

GROUP = FlagGroup(
    "data",
    "Data and batches",
    [
        Flag("--num-rollout", int, None, "Rollouts of the whole run."),
        Flag("--num-epoch", int, None, "Passes over the data instead of --num-rollout."),
        off("--disable-rollout-global-dataset", "rollout_global_dataset", "The rollout function brings its own data."),
        Flag(
            "--data-source-path",
            str,
            "slime.rollout.data_source.RolloutDataSourceWithBuffer",
            "Class that hands out prompt groups.",
        ),
        Flag("--prompt-data", str, None, "jsonl or parquet file of prompts; path@[a:b] takes a slice."),
        switch("--apply-chat-template", "Render the prompts with the tokenizer's chat template."),
        Flag(
            "--apply-chat-template-kwargs", json_object, {}, "JSON object of further arguments of the chat template."
        ),
        Flag("--input-key", str, "input", "Key of the prompt in a row."),
        Flag("--label-key", str, None, "Key of the label in a row."),
        Flag("--multimodal-keys", json_object, None, "JSON object: media kind to its key in a row.", supported=False),
        Flag("--metadata-key", str, "metadata", "Key of the metadata in a row."),
        Flag("--tool-key", str, "tools", "Key of the tools in a row."),
        switch(
            "--skip-malformed-rows", "Skip rows that cannot be read, with a count, instead of stopping at the first."
        ),
        Flag("--start-rollout-id", int, None, "First rollout. Default: after the loaded checkpoint's, else 0."),
        Flag("--rollout-batch-size", int, None, "Prompts per rollout.", required=True),
        Flag("--n-samples-per-prompt", int, 1, "Responses per prompt; a group for GRPO-like estimators."),
        Flag("--global-batch-size", int, None, "Responses per optimizer step."),
        Flag("--num-steps-per-rollout", int, None, "Optimizer steps per rollout; sets --global-batch-size."),
        Flag(
            "--micro-batch-size", int, 1, "Responses per micro-batch; without effect under --use-dynamic-batch-size."
        ),
        switch("--balance-data", "Balance the work over the data-parallel ranks."),
        switch(
            "--balance-by-flops",
            "Build micro-batches by FLOPs, which may exceed --max-tokens-per-gpu; implies --balance-data.",
        ),
        switch("--use-dynamic-batch-size", "Pack responses into micro-batches of up to --max-tokens-per-gpu tokens."),
        Flag(
            "--max-tokens-per-gpu",
            int,
            None,
            "Tokens of one packed micro-batch on one GPU; x context-parallel size in all.",
        ),
        Flag(
            "--log-probs-max-tokens-per-gpu",
            int,
            None,
            "--max-tokens-per-gpu of passes that only compute log-probs.",
            supported=False,
        ),
    ],
)
