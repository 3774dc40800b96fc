"""Rules of sampling, estimators, losses and corrections."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.flag import Problem

# Sampling parameters of SGLang that change the distribution and that slime's requests leave open.
SHAPING = frozenset({"min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"})
GROUP_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
KL_IN_REWARD_ESTIMATORS = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def check_sampling(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Rollouts are sampled, not greedy: temperature 0 is no distribution. Evaluation may be greedy (0)."""
    if a.rollout_temperature <= 0:
        says = f"is {a.rollout_temperature:g}, must be > 0: training needs samples of a distribution"
        yield Problem(("--rollout-temperature",), says, "--rollout-temperature 1.0")
    if a.eval_temperature is not None and a.eval_temperature < 0:
        says = f"is {a.eval_temperature:g}, must be >= 0 (0 is greedy)"
        yield Problem(("--eval-temperature",), says, "--eval-temperature 0")
    if a.eval_top_p is not None and not 0 < a.eval_top_p <= 1:
        yield Problem(("--eval-top-p",), f"is {a.eval_top_p:g}, must be within (0, 1]", "--eval-top-p 1.0")
    if a.eval_top_k is not None and a.eval_top_k != -1 and a.eval_top_k < 1:
        yield Problem(("--eval-top-k",), f"is {a.eval_top_k}, must be -1 (off) or at least 1", "--eval-top-k -1")


def check_whole_distribution(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Rollouts sample from the distribution that the trainer scores them under: softmax(logits / temperature)."""
    why = "the trainer would need the tokens that were left to choose from at each position, which it does not get"
    for flag, value, off in (("--rollout-top-p", a.rollout_top_p, 1), ("--rollout-top-k", a.rollout_top_k, -1)):
        if value != off:
            says = f"{value:g} is not supported yet: {why}; {off} is off"
            yield Problem((flag,), says, f"{flag} {off}", kind="unsupported")
    preferred = a.sglang_preferred_sampling_params or {}
    for name in sorted(SHAPING & preferred.keys()):
        says = f"{name} {preferred[name]!r} is not supported: responses would come from another distribution than "
        says += "the one the trainer scores them under"
        yield Problem(("--sglang-preferred-sampling-params",), says, kind="unsupported")


def check_kl(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """One KL term, in the place where the estimator reads it."""
    if a.kl_coef != 0 and a.kl_loss_coef != 0:
        says = (
            f"{a.kl_coef:g} and {a.kl_loss_coef:g}: the KL term is either part of the reward or of the loss, not both"
        )
        yield Problem(
            ("--kl-coef", "--kl-loss-coef"), says, f"--kl-coef 0 --use-kl-loss --kl-loss-coef {a.kl_loss_coef:g}"
        )
    elif (
        a.kl_coef != 0
        and not a.custom_advantage_function_path
        and a.advantage_estimator not in KL_IN_REWARD_ESTIMATORS
    ):
        says = (
            f"{a.kl_coef:g} has no effect with --advantage-estimator {a.advantage_estimator}, whose rewards carry "
            f"no KL penalty (only {', '.join(KL_IN_REWARD_ESTIMATORS)} and custom advantage functions do)"
        )
        yield Problem(("--kl-coef",), says, f"--kl-coef 0 --use-kl-loss --kl-loss-coef {a.kl_coef:g}")


def check_estimator(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """What the advantage estimators ask for."""
    if (
        a.advantage_estimator.startswith("reinforce_plus_plus")
        and not a.normalize_advantages
        and a.loss_type == "policy_loss"
    ):
        says = f"{a.advantage_estimator} is defined on advantages normalised over the batch"
        yield Problem(("--advantage-estimator",), says, "--normalize-advantages")
    if a.group_rm and a.eval_datasets and a.eval_interval is not None and not a.custom_rm_path:
        says = "scores whole groups, and evaluation scores single samples"
        legal = "leave --group-rm out, or give each data set of --eval-config a custom_rm_path"
        yield Problem(("--group-rm", "--eval-interval"), says, legal)


def check_groups(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Rewards that are compared within a group need one. Functions of the user's may make larger groups."""
    custom = (
        a.custom_advantage_function_path
        or a.custom_reward_post_process_path
        or a.custom_convert_samples_to_train_data_path
        or a.custom_generate_function_path
        or "rollout_function_path" in given
    )
    trains = a.loss_type == "policy_loss" and a.compute_advantages_and_returns and a.num_rollout != 0
    compares = a.rewards_normalization and a.advantage_estimator in GROUP_NORMALISED and not custom
    if a.n_samples_per_prompt == 1 and trains and compares and not a.debug_rollout_only:
        says = (
            f"1 with --advantage-estimator {a.advantage_estimator}: reward - mean of a group of one is 0, so nothing "
        )
        legal = "--n-samples-per-prompt 8, or --disable-rewards-normalization"
        yield Problem(("--n-samples-per-prompt",), says + "of the reward would be learned", legal)


def check_corrections(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Importance-sampling corrections compare the trainer's old log-probs with the engines'."""
    if a.use_rollout_logprobs and a.use_tis:
        says = (
            "the engines' log-probs are already the old policy's, so there is nothing to correct; give one of the two"
        )
        yield Problem(("--use-rollout-logprobs", "--use-tis"), says, "leave --use-rollout-logprobs out")
    if a.get_mismatch_metrics and not a.custom_tis_function_path:
        yield Problem(
            ("--get-mismatch-metrics",), "the metrics come from --custom-tis-function-path, which is not given"
        )
    if a.tis_clip_low > a.tis_clip:
        says = f"{a.tis_clip_low:g} is above --tis-clip {a.tis_clip:g}"
        yield Problem(("--tis-clip-low",), says, "--tis-clip-low 0")


def check_loss(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Clip ranges and the function of a custom loss."""
    if a.loss_type == "custom_loss" and not a.custom_loss_function_path:
        yield Problem(
            ("--loss-type",),
            "custom_loss needs --custom-loss-function-path",
            "--custom-loss-function-path my.module.loss",
        )
    for flag, value in (("--eps-clip", a.eps_clip), ("--eps-clip-high", a.eps_clip_high)):
        if value < 0:
            yield Problem((flag,), f"is {value:g}, must be >= 0", f"{flag} 0.2")
    if a.eps_clip_c is not None and a.eps_clip_c <= 1:
        yield Problem(("--eps-clip-c",), f"is {a.eps_clip_c:g}, must be > 1", "--eps-clip-c 3.0")
    if a.log_probs_chunk_size != -1 and a.log_probs_chunk_size < 1:
        says = f"is {a.log_probs_chunk_size}, must be -1 (as many rows as 1 GiB holds) or at least 1"
        yield Problem(("--log-probs-chunk-size",), says, "--log-probs-chunk-size 1024")


def check_trained_parameters(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Parameters are chosen either by what trains or by what stays."""
    if a.only_train_params_name_list and a.freeze_params_name_list:
        says = "choose parameters either by what trains or by what stays; give one of the two"
        yield Problem(("--only-train-params-name-list", "--freeze-params-name-list"), says)


def check_critic(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Rollouts that train the critic alone need one, a critic needs a loss that its values count in; ranges."""
    trains_values = a.compute_advantages_and_returns and a.loss_type != "sft_loss"
    if a.use_critic and not trains_values and not a.debug_rollout_only:
        cause = "--loss-type" if a.loss_type == "sft_loss" else "--disable-compute-advantages-and-returns"
        says = "ppo trains a critic, whose values nothing would read"
        yield Problem(("--advantage-estimator", cause), says, "--advantage-estimator grpo")
    if a.num_critic_only_steps < 0:
        says = f"is {a.num_critic_only_steps}, must be at least 0"
        yield Problem(("--num-critic-only-steps",), says, "--num-critic-only-steps 0")
    elif a.num_critic_only_steps and not a.use_critic:
        says = f"{a.num_critic_only_steps} rollouts train a critic, which {a.advantage_estimator} has not"
        yield Problem(("--num-critic-only-steps",), says, "--advantage-estimator ppo")
    for flag, value in (("--gamma", a.gamma), ("--lambd", a.lambd)):
        if not 0 <= value <= 1:
            yield Problem((flag,), f"is {value:g}, must be within [0, 1]", f"{flag} 1.0")
    if a.value_clip < 0:
        yield Problem(("--value-clip",), f"is {a.value_clip:g}, must be >= 0", "--value-clip 0.2")


def check_routing_replay(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Replaying the experts needs experts, and a pass that records them."""
    replay, from_engines = "--use-routing-replay", "--use-rollout-routing-replay"
    asked = from_engines if a.use_rollout_routing_replay else replay
    if not (a.use_routing_replay or a.use_rollout_routing_replay) or a.debug_rollout_only:
        return
    if not a.num_experts and a.num_layers:
        yield Problem((asked,), "replays the choice of experts, and the model has none; leave it out")
    if a.use_rollout_logprobs and not a.use_rollout_routing_replay and not a.get_mismatch_metrics:
        says = "the engines' log-probs leave out the pass that would record the trainer's experts"
        yield Problem((replay, "--use-rollout-logprobs"), says, from_engines)


CHECKS = (
    check_sampling,
    check_whole_distribution,
    check_kl,
    check_estimator,
    check_groups,
    check_corrections,
    check_loss,
    check_trained_parameters,
    check_critic,
    check_routing_replay,
)
