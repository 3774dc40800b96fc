"""Flags: how responses are generated."""

from slime.utils.arguments.flag import Flag, FlagGroup, switch

GROUP = FlagGroup(
    "rollout",
    "Rollout: how responses are generated",
    [
        Flag(
            "--hf-checkpoint", str, None, "Hugging Face directory: engine weights, tokenizer, processor, model facts."
        ),
        Flag(
            "--model-name",
            str,
            None,
            "Model family for weight names. Default: the class name in the checkpoint's config.",
        ),
        Flag(
            "--rollout-function-path",
            str,
            "slime.rollout.sglang_rollout.generate_rollout",
            "Function f(args, rollout_id, data_source, evaluation=False) that makes one rollout.",
        ),
        Flag("--rollout-temperature", float, 1.0, "Sampling temperature, > 0."),
        Flag("--rollout-top-p", float, 1.0, "Nucleus sampling; 1, which is off, is the only value supported so far."),
        Flag(
            "--rollout-top-k",
            int,
            -1,
            "Sample from the k likeliest tokens; -1, off, is the only value supported so far.",
        ),
        Flag("--rollout-max-context-len", int, None, "Tokens of prompt and response together."),
        Flag("--rollout-max-prompt-len", int, None, "Longer prompts are dropped when the data set is loaded."),
        Flag("--rollout-max-response-len", int, None, "Most tokens of one response."),
        switch("--rollout-skip-special-tokens", "Leave special tokens out of the response text."),
        Flag("--rollout-stop", str, None, "Texts that end a response.", nargs="+"),
        Flag("--rollout-stop-token-ids", int, None, "Token ids that end a response.", nargs="+"),
        switch("--rollout-shuffle", "Shuffle the prompts in each epoch."),
        Flag("--rollout-seed", int, 42, "Seed of shuffling and of deterministic sampling."),
        Flag("--over-sampling-batch-size", int, None, "Prompts taken at a time. Default: --rollout-batch-size."),
        Flag(
            "--dynamic-sampling-filter-path",
            str,
            None,
            "Function f(args, group) that keeps or drops a finished group.",
        ),
        switch("--partial-rollout", "Keep unfinished responses for the next rollout instead of starting them anew."),
        switch("--mask-offpolicy-in-partial-rollout", "Give tokens generated in an earlier rollout no loss."),
        Flag(
            "--custom-generate-function-path",
            str,
            None,
            "Coroutine f(args, sample, sampling_params) that generates one sample.",
        ),
        Flag(
            "--rollout-sample-hook-path",
            str,
            [],
            "Hook f(args, sample) between generation and reward; may be given several times.",
            kind="append",
        ),
        Flag(
            "--custom-rollout-log-function-path",
            str,
            None,
            "Function that logs a rollout; true skips the built-in log.",
        ),
        Flag(
            "--custom-eval-rollout-log-function-path",
            str,
            None,
            "Function that logs an evaluation; true skips the built-in log.",
        ),
        Flag(
            "--buffer-filter-path",
            str,
            None,
            "Function f(args, None, buffer, num_samples) that takes groups from the buffer.",
        ),
        Flag(
            "--update-weights-interval",
            int,
            1,
            "Rollouts between weight updates, asynchronous driver only.",
            supported=False,
        ),
        switch(
            "--keep-old-actor",
            "Keep a copy of the policy that generated the data, for its log-probs.",
            supported=False,
        ),
        Flag(
            "--rollout-data-postprocess-path",
            str,
            None,
            "Hook f(args, rollout_id, rollout_data) on every trainer before training.",
        ),
        Flag(
            "--rollout-data-transport",
            str,
            "object-store",
            "How training data reaches the trainers.",
            choices=("object-store", "nixl"),
            unsupported_choices=("nixl",),
        ),
        Flag(
            "--rollout-external-engine-addrs",
            str,
            None,
            "Addresses of engines that were started elsewhere.",
            nargs="+",
            supported=False,
        ),
        Flag(
            "--rollout-stall-timeout",
            float,
            1800.0,
            "Seconds without any finished sample after which a rollout is an error.",
        ),
    ],
)
