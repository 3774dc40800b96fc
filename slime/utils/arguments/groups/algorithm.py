"""Flags: the training algorithm - estimator, losses, corrections, optimizer basics, checkpoints."""

from slime.utils.arguments.flag import Flag, FlagGroup, off, switch

ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")

CHECKPOINTS = (
    Flag(
        "--load", str, None, "Checkpoint to start from: a Megatron directory resumes, a Hugging Face one is converted."
    ),
    Flag("--save", str, None, "Directory of the run's checkpoints."),
    Flag("--save-interval", int, None, "Rollouts between checkpoints."),
    switch("--async-save", "Write checkpoints in the background.", supported=False),
    switch("--no-save-optim", "Leave the optimizer out of checkpoints; such a run cannot be resumed exactly."),
    Flag("--save-hf", str, None, "Directory of a Hugging Face export at each save; {rollout_id} is filled in."),
    Flag("--ref-load", str, None, "Checkpoint of the reference model."),
    Flag("--ref-ckpt-step", int, None, "Iteration to load from --ref-load. Default: the newest."),
)

GROUP = FlagGroup(
    "algorithm",
    "Algorithm",
    [
        *CHECKPOINTS,
        Flag("--seed", int, 1234, "Seed of model initialisation; also of the engines."),
        Flag("--clip-grad", float, 1.0, "Largest norm of the gradient."),
        switch("--calculate-per-token-loss", "Average the loss over tokens instead of over responses."),
        Flag("--lr", float, 1e-6, "Learning rate."),
        Flag("--num-critic-only-steps", int, 0, "First rollouts that train the critic alone."),
        Flag("--megatron-config-path", str, None, "YAML file with settings that hold for one training role alone."),
        Flag("--eps-clip", float, 0.2, "Lower clip range of the probability ratio."),
        Flag("--eps-clip-high", float, None, "Upper clip range. Default: --eps-clip."),
        Flag("--eps-clip-c", float, None, "Bound of the loss for negative advantages (dual clip), > 1."),
        Flag("--value-clip", float, 0.2, "Clip range of the value loss."),
        Flag("--kl-coef", float, 0.0, "Weight of the KL penalty in rewards."),
        Flag(
            "--loss-type",
            str,
            "policy_loss",
            "Loss of a micro-batch.",
            choices=("policy_loss", "sft_loss", "custom_loss"),
        ),
        Flag(
            "--custom-loss-function-path",
            str,
            None,
            "Function f(args, batch, logits, sum_of_sample_mean) of custom_loss.",
        ),
        Flag("--kl-loss-type", str, "k1", "Estimator of the KL divergence.", choices=("k1", "k2", "k3", "low_var_kl")),
        Flag(
            "--advantage-estimator",
            str,
            "grpo",
            "How advantages follow from rewards.",
            choices=ESTIMATORS,
        ),
        off(
            "--disable-compute-advantages-and-returns",
            "compute_advantages_and_returns",
            "Do not compute advantages and returns, for losses that need none.",
        ),
        Flag(
            "--custom-advantage-function-path",
            str,
            None,
            "Function f(args, rollout_data) that sets advantages and returns.",
        ),
        switch("--use-kl-loss", "Add a KL divergence to the reference model to the loss."),
        Flag("--kl-loss-coef", float, 0.0, "Weight of the KL loss."),
        switch("--use-unbiased-kl", "Correct the KL loss by the importance ratio."),
        Flag("--ref-update-interval", int, None, "Rollouts after which the reference becomes the current policy."),
        Flag("--entropy-coef", float, 0.0, "Weight of the entropy bonus."),
        Flag("--gamma", float, 1.0, "Discount of returns."),
        Flag("--lambd", float, 1.0, "Lambda of generalised advantage estimation."),
        switch("--normalize-advantages", "Whiten advantages over the batch."),
        off(
            "--disable-grpo-std-normalization",
            "grpo_std_normalization",
            "Do not divide by the group's standard deviation.",
        ),
        off("--disable-rewards-normalization", "rewards_normalization", "Use rewards as they are."),
        switch("--use-rollout-entropy", "Compute the entropy of the policy along with log-probs."),
        switch(
            "--get-mismatch-metrics",
            "Report the mismatch of training and rollout log-probs; needs --custom-tis-function-path.",
        ),
        switch("--reset-optimizer-states", "Start each rollout with fresh optimizer states.", supported=False),
        switch("--use-stateless-adam", "Adam without states between rollouts.", supported=False),
        switch("--use-rollout-logprobs", "Use the engines' log-probs as the old policy's."),
        switch("--use-tis", "Truncated importance sampling between engine and trainer log-probs."),
        Flag("--tis-clip", float, 2.0, "Upper bound of the importance weight of --use-tis."),
        Flag("--tis-clip-low", float, 0.0, "Lower bound of the importance weight of --use-tis."),
        Flag(
            "--custom-tis-function-path",
            str,
            None,
            "Function that corrects the loss instead of truncated importance sampling.",
        ),
        Flag(
            "--custom-pg-loss-reducer-function-path", str, None, "Function that makes the reducer of the policy loss."
        ),
        switch("--use-routing-replay", "Replay the experts chosen in the log-prob pass.", supported=False),
        switch("--use-rollout-routing-replay", "Replay the experts chosen by the engines.", supported=False),
        switch("--use-opsm", "Mask sequences that moved too far off the policy."),
        Flag("--opsm-delta", float, 1e-4, "Threshold of --use-opsm."),
    ],
)
