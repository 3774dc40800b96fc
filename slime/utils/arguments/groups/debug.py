"""Flags: parts of the loop alone, dumps, profiles, and the checks that continuous integration uses."""

from slime.utils.arguments.flag import Flag, FlagGroup, switch

GROUP = FlagGroup(
    "debug",
    "Debugging",
    [
        switch("--debug-rollout-only", "Generate only; do not train."),
        switch("--debug-train-only", "Train only; start no engines."),
        Flag(
            "--load-debug-rollout-data",
            str,
            None,
            "Train on saved rollouts ({rollout_id} is filled in); implies --debug-train-only.",
        ),
        Flag("--load-debug-rollout-data-subsample", float, None, "Fraction of each saved rollout to keep."),
        Flag("--save-debug-rollout-data", str, None, "File for each rollout; {rollout_id} is filled in."),
        Flag(
            "--save-debug-train-data",
            str,
            None,
            "File for each rollout's training data; {rollout_id} and {rank} are filled in.",
        ),
        Flag("--dump-details", str, None, "Directory for --save-debug-rollout-data and --save-debug-train-data."),
        Flag("--load-forge-rollout-data", str, None, "Saved rollouts to replay with live engines.", supported=False),
        Flag("--memory-snapshot-dir", str, ".", "Directory of memory snapshots.", supported=False),
        Flag("--memory-snapshot-num-steps", int, None, "Steps a memory snapshot covers.", supported=False),
        Flag("--memory-recorder", str, "torch", "Memory recorder.", choices=("torch", "memray"), supported=False),
        switch("--record-memory-history", "Record the history of GPU memory.", supported=False),
        Flag(
            "--profile-target",
            str,
            ["train_overall"],
            "What to profile.",
            nargs="+",
            choices=("train_overall", "train_actor", "train_log_probs"),
            supported=False,
        ),
        switch(
            "--check-weight-update-equal",
            "Check that engines hold the trainer's weights after an update.",
            supported=False,
        ),
        switch("--ci-test", "Check invariants of the first steps.", supported=False),
        switch("--ci-disable-kl-checker", "Leave the KL check of --ci-test out.", supported=False),
        Flag(
            "--ci-train-rollout-logprob-abs-diff-threshold",
            float,
            0.1,
            "Largest mean difference of training and rollout log-probs.",
            supported=False,
        ),
        Flag("--ci-save-grad-norm", str, None, "File for gradient norms.", supported=False),
        Flag("--ci-load-grad-norm", str, None, "File of gradient norms to compare with.", supported=False),
    ],
)
