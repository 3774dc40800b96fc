"""Flags that have no effect in this configuration: one warning block, by a table of rules."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import NamedTuple

from slime.utils.arguments.hf_config import is_hf_checkpoint, is_megatron_checkpoint


class Unused(NamedTuple):
    """`dest` is without effect when `when(args)` holds, because `why`."""

    dest: str
    when: Callable[[Namespace], bool]
    why: str


def _no_kl(a: Namespace) -> bool:
    return a.kl_coef == 0 and not a.use_kl_loss


def _not_policy_loss(a: Namespace) -> bool:
    return a.loss_type != "policy_loss"


RULES = (
    Unused("ref_load", lambda a: _no_kl(a) and a.load != a.ref_load, "no KL term compares with a reference model"),
    Unused("ref_update_interval", _no_kl, "no KL term compares with a reference model"),
    Unused("kl_loss_coef", lambda a: not a.use_kl_loss, "--use-kl-loss is not given"),
    Unused("kl_loss_type", _no_kl, "no KL term is computed"),
    Unused("use_unbiased_kl", lambda a: not a.use_kl_loss, "--use-kl-loss is not given"),
    Unused("tis_clip", lambda a: not a.use_tis, "--use-tis is not given"),
    Unused("tis_clip_low", lambda a: not a.use_tis, "--use-tis is not given"),
    Unused("opsm_delta", lambda a: not a.use_opsm, "--use-opsm is not given"),
    Unused(
        "gamma",
        lambda a: not a.advantage_estimator.startswith("reinforce_plus_plus"),
        "the estimator does not discount",
    ),
    Unused("micro_batch_size", lambda a: a.use_dynamic_batch_size, "--use-dynamic-batch-size packs by tokens"),
    Unused("max_tokens_per_gpu", lambda a: not a.use_dynamic_batch_size, "--use-dynamic-batch-size is not given"),
    Unused("advantage_estimator", _not_policy_loss, "the loss is not policy_loss"),
    Unused("eps_clip", _not_policy_loss, "the loss is not policy_loss"),
    Unused("use_tis", _not_policy_loss, "the loss is not policy_loss"),
    Unused("use_kl_loss", _not_policy_loss, "the loss is not policy_loss"),
    Unused("custom_loss_function_path", lambda a: a.loss_type != "custom_loss", "--loss-type is not custom_loss"),
    Unused("eval_interval", lambda a: a.debug_train_only, "no engines are started"),
    Unused("eval_prompt_data", lambda a: bool(a.eval_config), "--eval-config wins"),
    Unused("num_epoch", lambda a: a.num_rollout is not None, "--num-rollout wins"),
    Unused("rollout_num_gpus", lambda a: a.debug_train_only and bool(a.rollout_num_gpus), "no engines are started"),
    Unused("save_interval", lambda a: a.debug_rollout_only, "nothing is trained"),
    Unused(
        "update_weight_disk_dir",
        lambda a: a.update_weight_transport != "disk",
        "--update-weight-transport is not disk",
    ),
    Unused(
        "update_weight_disk_keep_files",
        lambda a: a.update_weight_transport != "disk",
        "--update-weight-transport is not disk",
    ),
    Unused(
        "update_weight_transport",
        lambda a: a.colocate and a.update_weight_transport == "nccl",
        "--colocate hands weights over directly",
    ),
    Unused("mask_offpolicy_in_partial_rollout", lambda a: not a.partial_rollout, "--partial-rollout is not given"),
    Unused("allgather_cp", lambda a: a.context_parallel_size == 1, "there is no context parallelism"),
    Unused(
        "load_debug_rollout_data_subsample",
        lambda a: a.load_debug_rollout_data is None,
        "--load-debug-rollout-data is not given",
    ),
    Unused("use_distributed_optimizer", lambda a: True, "the distributed optimizer is always on"),
    Unused("seq_length", lambda a: True, "micro-batches are packed and of variable length"),
    Unused("train_iters", lambda a: True, "--num-rollout sets the length of the run"),
)


def warnings(a: Namespace, given: Mapping[str, str], asked_load: str | None) -> list[str]:
    """Sentences about flags without effect and choices that are legal but rarely meant.

    asked_load: --load as the user gave it, before the fallback to --ref-load or --hf-checkpoint.
    """
    found = [f"{given[rule.dest]} has no effect: {rule.why}" for rule in RULES if rule.dest in given and rule.when(a)]
    if (
        asked_load
        and asked_load != a.save
        and not (is_megatron_checkpoint(asked_load) or is_hf_checkpoint(asked_load))
    ):
        found.append(f"--load {asked_load} holds no checkpoint; training starts from {a.load}")
    if a.num_rollout == 0 and a.eval_interval is None:
        found.append("--num-rollout 0 without --eval-interval: nothing will be trained or evaluated")
    if a.rm_type == "exact" and not (a.rollout_skip_special_tokens or a.debug_train_only):
        found.append(
            "--rm-type exact without --rollout-skip-special-tokens: the graded text ends in the stop token's text "
            "(such as <|im_end|>), which a label rarely does, so the reward would be 0"
        )
    if a.advantage_estimator == "cispo" and a.eps_clip < 1:
        found.append(
            f"--eps-clip {a.eps_clip:g} with cispo cuts small ratios; the method has no lower bound (--eps-clip 1)"
        )
    return found
