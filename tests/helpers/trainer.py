"""What trainer tests need without a command line: a driver's namespace, and rollouts with their schedule per rank."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import VOCAB, megatron_flags

# The trainer-side attributes of the driver's namespace, with the command line's defaults (CPU, fp32).
_DEFAULTS: dict[str, Any] = {
    "accelerator": "cpu",
    "hf_checkpoint": None,
    "model_name": None,
    "load": None,
    "save": None,
    "save_interval": None,
    "save_hf": None,
    "ref_load": None,
    "ref_ckpt_step": None,
    "ckpt_step": None,
    "finetune": False,
    "start_rollout_id": None,
    "num_rollout": 100,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "use_dynamic_batch_size": False,
    "max_tokens_per_gpu": None,
    "balance_data": False,
    "balance_by_flops": False,
    "data_pad_size_multiplier": 1,
    "lr": 1e-3,
    "clip_grad": 1.0,
    "seed": 1234,
    "bf16": False,
    "fp16": False,
    "eval_interval": None,
    "distributed_timeout_minutes": 2,
    "offload_train": False,
    "colocate": False,
    "loss_type": "policy_loss",
    "advantage_estimator": "grpo",
    "compute_advantages_and_returns": True,
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "value_clip": 0.2,
    "gamma": 1.0,
    "lambd": 1.0,
    "normalize_advantages": False,
    "use_rollout_logprobs": False,
    "use_rollout_entropy": False,
    "get_mismatch_metrics": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "use_opd": False,
    "opd_kl_coef": 1.0,
    "keep_old_actor": False,
    "ref_update_interval": None,
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "log_probs_chunk_size": -1,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "allgather_cp": False,
    "enable_mtp_training": False,
    "only_train_params_name_list": None,
    "freeze_params_name_list": None,
    "save_debug_train_data": None,
    "custom_model_provider_path": None,
    "custom_megatron_init_path": None,
    "custom_megatron_before_log_prob_hook_path": None,
    "custom_megatron_before_train_step_hook_path": None,
    "custom_advantage_function_path": None,
    "custom_loss_function_path": None,
    "custom_tis_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "rollout_data_postprocess_path": None,
}


def trainer_args(model: str, hf_checkpoint: str | Path, *megatron_flags_: str, **overrides: Any) -> Namespace:
    """A driver's namespace that trains the tiny model `model`; extra positional values are Megatron flags."""
    unknown = overrides.keys() - _DEFAULTS.keys()
    if unknown:
        raise ValueError(f"not a trainer attribute: {sorted(unknown)}")
    argv = [*megatron_flags(model), "--lr-decay-style", "constant", "--weight-decay", "0.1", "--adam-beta2", "0.98"]
    values = _DEFAULTS | {"hf_checkpoint": str(hf_checkpoint)} | overrides
    return Namespace(**values, megatron_argv=[*argv, *megatron_flags_])


def make_rollout(
    seed: int,
    samples: int = 8,
    prompt: tuple[int, int] = (2, 9),
    response: tuple[int, int] = (1, 12),
    without_response: int | None = None,
) -> dict[str, list[Any]]:
    """Random ragged train data: a dict of per-sample lists, with rewards, rollout log-probs and some masked tokens.

    without_response: position of a sample whose prompt nobody answered.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    data: dict[str, list[Any]] = {key: [] for key in ("tokens", "response_lengths", "loss_masks", "rewards")}
    data["rollout_log_probs"] = []
    for position in range(samples):
        n_prompt, n_response = randint(*prompt), randint(*response)
        if position == without_response:
            n_response = 0
        data["tokens"].append(torch.randint(3, VOCAB, (n_prompt + n_response,), generator=generator))
        data["response_lengths"].append(n_response)
        mask = torch.rand(n_response, generator=generator) > 0.25
        mask[:1] = True
        data["loss_masks"].append(mask.int())
        data["rewards"].append(float(torch.randn(1, generator=generator)))
        data["rollout_log_probs"].append(-5.0 + 0.3 * torch.randn(n_response, generator=generator))
    data["total_lengths"] = [len(t) for t in data["tokens"]]
    data["raw_reward"] = list(data["rewards"])
    data["truncated"] = [0] * samples
    data["sample_indices"] = list(range(samples))
    data["rollout_ids"] = list(range(samples))
    data["rollout_mask_sums"] = [float(mask.sum()) for mask in data["loss_masks"]]
    return data


_PER_SAMPLE = (
    "tokens",
    "response_lengths",
    "loss_masks",
    "rewards",
    "rollout_log_probs",
    "truncated",
    "sample_indices",
    "rollout_ids",
    "rollout_mask_sums",
)


def rank_share(args: Namespace, parallel_config: dict[str, int], dp_rank: int, data: dict[str, Any]) -> dict[str, Any]:
    """What data-parallel rank `dp_rank` receives of `data`, by slime's own schedule."""
    from slime.utils.dp_schedule import build_dp_schedule

    partitions, indices, counts, batch_sizes = build_dp_schedule(
        args,
        parallel_config,
        data["total_lengths"],
        global_batch_size=args.global_batch_size,
        rollout_indices=data["rollout_ids"],
    )
    partition = partitions[dp_rank]
    share = {key: [data[key][i] for i in partition] for key in _PER_SAMPLE}
    return share | {
        "partition": partition,
        "total_lengths": data["total_lengths"],
        "raw_reward": data["raw_reward"],
        "micro_batch_indices": indices[dp_rank],
        "num_microbatches": counts,
        "global_batch_sizes": batch_sizes,
    }
