"""What is legal and worth a look: flags without effect, by a table of rules, and choices that are rarely meant.

All of it comes in one block. What cannot be meant is a problem, and stands in `checks/`.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from slime.utils.arguments.checkpoint_facts import same_fact
from slime.utils.arguments.checks.common import model_config
from slime.utils.arguments.checks.hooks import unchecked_hooks
from slime.utils.arguments.checks.lengths import model_length
from slime.utils.arguments.hf_config import is_hf_checkpoint, is_megatron_checkpoint, uses_sparse_attention


class Unused(NamedTuple):
    """`dest` is without effect when `when(args)` holds, because `why`."""

    dest: str
    when: Callable[[Namespace], bool]
    why: str


def _no_kl(a: Namespace) -> bool:
    return a.kl_coef == 0 and not a.use_kl_loss


def _no_eval(a: Namespace) -> bool:
    return a.eval_interval is None


def _no_remote_reward(a: Namespace) -> bool:
    types = [a.rm_type, *(data.rm_type for data in a.eval_datasets)]
    remote = any(name and name.endswith("remote_rm") for name in types)
    return not remote and not a.custom_rm_path and a.rm_type is not None and a.opd_type != "sglang"


def _not_glm4(a: Namespace) -> bool:
    return not a.custom_model_provider_path and not (a.spec and a.spec[0] == "slime_plugins.models.glm4")


def _not_policy_loss(a: Namespace) -> bool:
    return a.loss_type != "policy_loss"


RULES = (
    Unused("ref_load", lambda a: _no_kl(a) and a.load != a.ref_load, "no KL term compares with a reference model"),
    Unused("ref_update_interval", _no_kl, "no KL term compares with a reference model"),
    Unused("ref_ckpt_step", lambda a: a.ref_load is None, "--ref-load is not given"),
    Unused("kl_loss_coef", lambda a: not a.use_kl_loss and a.kl_loss_coef != 0, "--use-kl-loss is not given"),
    Unused("kl_loss_type", _no_kl, "no KL term is computed"),
    Unused("use_unbiased_kl", lambda a: not a.use_kl_loss, "--use-kl-loss is not given"),
    Unused("tis_clip", lambda a: not a.use_tis, "--use-tis is not given"),
    Unused("tis_clip_low", lambda a: not a.use_tis, "--use-tis is not given"),
    Unused(
        "custom_tis_function_path",
        lambda a: not (a.use_tis or a.get_mismatch_metrics),
        "neither --use-tis nor --get-mismatch-metrics is given",
    ),
    Unused("post_self_attn_layernorm", _not_glm4, "only the layers of slime_plugins.models.glm4 have that norm"),
    Unused("post_mlp_layernorm", _not_glm4, "only the layers of slime_plugins.models.glm4 have that norm"),
    Unused("opsm_delta", lambda a: not a.use_opsm, "--use-opsm is not given"),
    Unused(
        "gamma",
        lambda a: not a.advantage_estimator.startswith(("reinforce_plus_plus", "ppo")),
        "the estimator does not discount",
    ),
    Unused("lambd", lambda a: not a.use_critic, "the estimator needs no values"),
    Unused("value_clip", lambda a: not a.use_critic, "the estimator needs no values"),
    Unused("micro_batch_size", lambda a: a.use_dynamic_batch_size, "--use-dynamic-batch-size packs by tokens"),
    Unused("max_tokens_per_gpu", lambda a: not a.use_dynamic_batch_size, "--use-dynamic-batch-size is not given"),
    Unused("advantage_estimator", _not_policy_loss, "the loss is not policy_loss"),
    Unused("eps_clip", _not_policy_loss, "the loss is not policy_loss"),
    Unused("eps_clip_c", _not_policy_loss, "the loss is not policy_loss"),
    Unused("entropy_coef", lambda a: a.loss_type == "sft_loss", "the loss is sft_loss"),
    Unused("use_tis", _not_policy_loss, "the loss is not policy_loss"),
    Unused("use_kl_loss", _not_policy_loss, "the loss is not policy_loss"),
    Unused("custom_loss_function_path", lambda a: a.loss_type != "custom_loss", "--loss-type is not custom_loss"),
    Unused("rm_type", lambda a: bool(a.custom_rm_path), "--custom-rm-path wins"),
    Unused("rm_url", _no_remote_reward, "no reward is asked for over the network"),
    Unused("eval_interval", lambda a: a.debug_train_only, "no engines are started"),
    Unused("eval_prompt_data", lambda a: bool(a.eval_config), "--eval-config wins"),
    Unused("eval_prompt_data", _no_eval, "--eval-interval is not given"),
    Unused("eval_config", _no_eval, "--eval-interval is not given"),
    Unused("skip_eval_before_train", _no_eval, "--eval-interval is not given"),
    Unused("eval_function_path", _no_eval, "--eval-interval is not given"),
    Unused("num_epoch", lambda a: a.num_rollout is not None, "--num-rollout wins"),
    Unused("rollout_num_gpus", lambda a: a.debug_train_only and bool(a.rollout_num_gpus), "no engines are started"),
    Unused("save", lambda a: a.save_interval is None and not a.debug_rollout_only, "--save-interval is not given"),
    Unused("save_hf", lambda a: a.save_interval is None and not a.debug_rollout_only, "--save-interval is not given"),
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
    Unused("freeze_indexer", lambda a: not uses_sparse_attention(a), "the model has no sparse attention"),
    Unused("dsa_indexer_loss_coeff", lambda a: not uses_sparse_attention(a), "the model has no sparse attention"),
    Unused(
        "dsa_indexer_use_sparse_loss",
        lambda a: not (uses_sparse_attention(a) and a.dsa_indexer_loss_coeff),
        "--dsa-indexer-loss-coeff does not train an indexer",
    ),
    Unused("mtp_loss_scaling_factor", lambda a: not a.enable_mtp_training, "--enable-mtp-training is not given"),
    Unused("cp_comm_type", lambda a: a.context_parallel_size == 1, "there is no context parallelism"),
    Unused(
        "sequence_parallel",
        lambda a: a.tensor_model_parallel_size == 1,
        "there is no tensor parallelism, without which Megatron switches it off",
    ),
    Unused(
        "expert_tensor_parallel_size",
        lambda a: not a.num_experts and a.expert_tensor_parallel_size != 1,
        "the model has no experts",
    ),
    Unused(
        "optimizer_offload_fraction", lambda a: not a.optimizer_cpu_offload, "--optimizer-cpu-offload is not given"
    ),
    Unused("weight_decay_incr_style", lambda a: a.weight_decay_incr_style == "constant", "constant is the default"),
    Unused(
        "sglang_deepep_mode",
        lambda a: a.sglang_moe_a2a_backend not in ("deepep", "mooncake", "nixl", "mori", "pplx"),
        "the engines do not use DeepEP (--sglang-moe-a2a-backend)",
    ),
    Unused(
        "load_debug_rollout_data_subsample",
        lambda a: a.load_debug_rollout_data is None,
        "--load-debug-rollout-data is not given",
    ),
    Unused("tb_project_name", lambda a: not a.use_tensorboard, "--use-tensorboard is not given"),
    Unused("tb_experiment_name", lambda a: not a.use_tensorboard, "--use-tensorboard is not given"),
    Unused("wandb_project", lambda a: not a.use_wandb, "--use-wandb is not given"),
    Unused("wandb_group", lambda a: not a.use_wandb, "--use-wandb is not given"),
    Unused("wandb_run_id", lambda a: not a.use_wandb, "--use-wandb is not given"),
    Unused("use_distributed_optimizer", lambda a: True, "the distributed optimizer is always on"),
    Unused("seq_length", lambda a: True, "micro-batches are packed and of variable length"),
    Unused("train_iters", lambda a: True, "--num-rollout sets the length of the run"),
)
# Facts of the model that change what its weights compute and not their shapes.
NUMERICS = (
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_scaling_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "dsa_indexer_topk",
)
# Flags of Megatron's own training loop, data sets and server, none of which runs here.
NOT_SLIMES_LOOP = re.compile(
    r"(data_path|split|mock_data|(train|valid|test|per_split)_data|data_args|data_cache|dataloader_|num_workers$|fim_"
    r"|eval_iters|eval_(global|micro)_batch|full_validation|start_eval_at|exit_(interval|duration|signal)|log_interval"
    r"|log_(params_norm|throughput|progress|timers|validation|memory|energy|straggler)|tensorboard_|timing_log"
    r"|inference_(?!cuda_graph_scope)|dino_|vision_|ict_|bert_|biencoder_|swin_|grpo_(?!std_)|rl_|straggler_|adlr_)"
)


def warnings(a: Namespace, given: Mapping[str, str], asked_load: str | None) -> list[str]:
    """Sentences about flags without effect and choices that are legal but rarely meant.

    asked_load: --load as the user gave it, before the fallback to --ref-load or --hf-checkpoint.
    """
    found = [f"{given[rule.dest]} has no effect: {rule.why}" for rule in RULES if rule.dest in given and rule.when(a)]
    for dest, flag in given.items():
        if NOT_SLIMES_LOOP.match(dest):
            found.append(f"{flag} has no effect: it is read by Megatron's own loop, which does not run here")
    found += _start(a, asked_load)
    found += _grading(a)
    if not a.debug_rollout_only:
        found += [*_training(a, given), *_numerics(a, given)]
    if not a.debug_train_only:
        found += _engines(a, given)
    return list(dict.fromkeys(found + unchecked_hooks(a, given)))


def _start(a: Namespace, asked_load: str | None) -> Iterator[str]:
    """Where the run starts, and how long it lasts."""
    known = asked_load and (is_megatron_checkpoint(asked_load) or is_hf_checkpoint(asked_load))
    if asked_load and asked_load != a.save and not known:
        yield f"--load {asked_load} holds no checkpoint; training starts from {a.load}"
    if a.save and a.save_interval and is_megatron_checkpoint(a.save) and a.load != a.save and not a.debug_rollout_only:
        yield f"--save {a.save} holds checkpoints already, and --load is another place: this run writes beside them"
    several = a.save_interval is not None and (a.num_rollout is None or a.save_interval < a.num_rollout)
    if a.save_hf and "{rollout_id" not in a.save_hf and several:
        yield f"--save-hf {a.save_hf} lacks {{rollout_id}}: each export replaces the one before"
    if a.num_rollout == 0 and a.eval_interval is None:
        yield "--num-rollout 0 without --eval-interval: nothing will be trained or evaluated"


def _grading(a: Namespace) -> Iterator[str]:
    if a.rm_type == "exact" and not (a.rollout_skip_special_tokens or a.debug_train_only):
        yield (
            "--rm-type exact without --rollout-skip-special-tokens: the graded text ends in the stop token's text "
            "(such as <|im_end|>), which a label rarely does, so the reward would be 0"
        )
    if a.advantage_estimator == "cispo" and a.eps_clip < 1:
        yield f"--eps-clip {a.eps_clip:g} with cispo cuts small ratios; the method has no lower bound (--eps-clip 1)"


def _training(a: Namespace, given: Mapping[str, str]) -> Iterator[str]:
    """Choices of the trainer that cost memory, time or accuracy."""
    yield from _longest_sample(a)
    tp, node = a.tensor_model_parallel_size, a.num_gpus_per_node
    if a.accelerator == "cuda" and tp > node > 0:
        yield f"--tensor-model-parallel-size {tp} reaches over nodes of {node} GPUs: each layer waits for the network"
    weights = a.moe_aux_loss_coeff if isinstance(a.moe_aux_loss_coeff, list) else [a.moe_aux_loss_coeff]
    if a.num_experts and any(weights):
        shown = " ".join(f"{weight:g}" for weight in weights)
        yield f"--moe-aux-loss-coeff {shown} adds a load-balancing gradient to the policy's; 0 leaves the router to it"
    if a.num_experts and (a.moe_expert_capacity_factor or -1) >= 0:
        yield (
            f"--moe-expert-capacity-factor {a.moe_expert_capacity_factor:g} drops tokens of crowded experts in "
            "training, which the engines never do"
        )
    if (a.num_experts or 0) >= 32 and a.moe_router_dtype is None and not a.fp32:
        yield (
            f"{a.num_experts} experts are scored in 16 bits, and near-equal ones may change places between trainer "
            "and engines: --moe-router-dtype fp32"
        )


def _longest_sample(a: Namespace) -> Iterator[str]:
    """A sample that is longer than a micro-batch gets one of its own, which nobody planned the memory for."""
    prompt, response = a.rollout_max_prompt_len, a.rollout_max_response_len
    longest = a.rollout_max_context_len or ((prompt or 0) + response if response else None)
    if not (a.use_dynamic_batch_size and a.max_tokens_per_gpu and longest) or a.context_parallel_size < 1:
        return
    room = a.max_tokens_per_gpu * a.context_parallel_size
    if longest > room:
        made = f"--max-tokens-per-gpu {a.max_tokens_per_gpu}"
        if a.context_parallel_size > 1:
            made += f" x --context-parallel-size {a.context_parallel_size} = {room}"
        yield (
            f"a sample may have {longest} tokens, more than the {room} of a micro-batch ({made}): it then gets a "
            f"micro-batch of its own and the memory of {-(-longest // a.context_parallel_size)} tokens on a GPU"
        )


def _numerics(a: Namespace, given: Mapping[str, str]) -> Iterator[str]:
    """Where trainer and engines would compute different functions of the same weights."""
    if not a.debug_train_only:
        for dest in NUMERICS:
            fact, value = a.checkpoint_facts.get(dest), getattr(a, dest)
            if dest in given and dest in a.checkpoint_facts and not same_fact(dest, fact, value, a.num_layers):
                yield (
                    f"{given[dest]} {value} trains another function of the weights than the engines serve, which read "
                    f"{fact} from config.json: their log-probs will not agree"
                )
    stored = str(model_config(a).get("torch_dtype") or model_config(a).get("dtype") or "")
    if stored == "bfloat16" and a.fp16:
        yield "--fp16 trains a bfloat16 checkpoint: values above 65504 become infinite"
    trained = "bfloat16" if a.bf16 else "float16" if a.fp16 else "float32"
    names = {"half": "float16", "float": "float32"}
    if "sglang_dtype" in given and names.get(a.sglang_dtype, a.sglang_dtype) not in (trained, "auto"):
        yield f"--sglang-dtype {a.sglang_dtype}: the engines compute in another precision than the trainer ({trained})"


def _engines(a: Namespace, given: Mapping[str, str]) -> Iterator[str]:
    length = model_length(model_config(a))
    if a.sglang_context_length is not None and length is not None and a.sglang_context_length > length:
        yield (
            f"--sglang-context-length {a.sglang_context_length} is above the model's {length} (config.json); SGLang "
            "refuses that unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 is set for the engines"
        )
    steps, drafts = a.sglang_speculative_num_steps, a.sglang_speculative_num_draft_tokens
    if steps and drafts and a.sglang_speculative_eagle_topk == 1 and drafts != steps + 1:
        yield (
            f"--sglang-speculative-num-draft-tokens {drafts}: a chain of {steps} steps "
            f"(--sglang-speculative-eagle-topk 1) has {steps + 1}, which SGLang uses instead"
        )
    if a.eval_interval and a.num_rollout and a.eval_interval > a.num_rollout and a.skip_eval_before_train:
        yield f"--eval-interval {a.eval_interval} is above --num-rollout {a.num_rollout}: only the last is evaluated"
