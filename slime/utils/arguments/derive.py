"""Fills derived values, once, on the draft of the namespace; afterwards nothing assigns to the arguments.

Every step takes the draft and the user's choices; a missing or illegal value is left alone, `validate.py` reports it.
"""

import logging
import os
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import yaml

from slime.utils.arguments.checks.algorithm import check_sampling
from slime.utils.arguments.checks.batch import check_ranges
from slime.utils.arguments.flag import Problem
from slime.utils.arguments.hf_config import (
    is_hf_checkpoint,
    is_megatron_checkpoint,
    is_unlisted_megatron_checkpoint,
    uses_sparse_attention,
)

logger = logging.getLogger(__name__)

SEQ_LENGTH = 4096  # a shape hint only: packed micro-batches have variable length
GPUS_PER_NODE_LIMIT = 8
# Flags that evaluation data sets fall back to, and the checks that look at their values.
SAMPLING = (
    *("n_samples_per_eval_prompt", "n_samples_per_prompt", "eval_max_response_len", "rollout_max_response_len"),
    *("eval_temperature", "rollout_temperature", "eval_top_p", "rollout_top_p", "eval_top_k", "rollout_top_k"),
)
CHECKS_OF_SAMPLING = (check_sampling, check_ranges)


def derive(a: Namespace, given: Mapping[str, str], environ: Mapping[str, str], dry_run: bool = False) -> list[Problem]:
    """Complete the draft `a` in place.

    given: dest -> option of everything the user set. environ: the entry point's environment. dry_run: the run is
    planned for other machines, so this one's devices decide nothing. Returns the problems that come up on the way:
    an unreadable evaluation config, a choice that contradicts another one.
    """
    _environment(a, environ)
    _accelerator(a, given, dry_run)
    _precision(a, given)
    _debug(a)
    _weights_to_start_from(a)
    _gpus(a)
    _offload(a, given)
    _batches(a)
    _algorithm(a)
    problems = _evaluation(a, given)
    _context_length(a)
    _megatron(a, given)
    problems += _context_parallel(a, given)
    _engines(a)
    a.log_dir = a.log_dir or _default_log_dir(a.save)
    return problems


def _environment(a: Namespace, environ: Mapping[str, str]) -> None:
    a.ray_address = a.ray_address or environ.get("RAY_ADDRESS") or None
    a.wandb_mode = a.wandb_mode or environ.get("WANDB_MODE") or None
    # SGLang cuts its pipeline stages by this variable alone
    a.sglang_pp_layer_partition = environ.get("SGLANG_PP_LAYER_PARTITION") or None


def _accelerator(a: Namespace, given: Mapping[str, str], dry_run: bool) -> None:
    from slime.utils.accelerator import detect_accelerator

    if a.accelerator == "auto":
        a.accelerator = "cuda" if dry_run else detect_accelerator()
    if a.accelerator == "cpu" and "distributed_backend" not in given:
        a.distributed_backend = "gloo"


def _precision(a: Namespace, given: Mapping[str, str]) -> None:
    """bf16 unless fp16 or fp32 is asked for; on a CPU, where bf16 is slow, fp32 unless bf16 is asked for."""
    if "bf16" not in given:
        a.bf16 = not (a.fp16 or a.fp32) and a.accelerator != "cpu"
    a.fp32 = not (a.bf16 or a.fp16)


def _debug(a: Namespace) -> None:
    if a.load_debug_rollout_data is not None:
        a.debug_train_only = True
    if a.dump_details is not None:
        a.save_debug_rollout_data = a.save_debug_rollout_data or f"{a.dump_details}/rollout_data/{{rollout_id}}.pt"
        a.save_debug_train_data = a.save_debug_train_data or f"{a.dump_details}/train_data/{{rollout_id}}_{{rank}}.pt"


def _weights_to_start_from(a: Namespace) -> None:
    """A Megatron checkpoint in --load resumes; else --load (if HF), --ref-load or --hf-checkpoint starts afresh."""
    if a.debug_rollout_only or is_megatron_checkpoint(a.load):
        return
    a.no_load_optim = a.no_load_rng = a.finetune = True
    if a.start_rollout_id is None:
        a.start_rollout_id = 0
    if is_hf_checkpoint(a.load) or is_unlisted_megatron_checkpoint(a.load):  # the latter is a problem by itself
        return
    wanted, a.load = a.load, a.ref_load or a.hf_checkpoint
    if a.load == a.ref_load:
        a.ckpt_step = a.ref_ckpt_step
    if a.load is not None:
        reason = f"{wanted} holds no checkpoint" if wanted else "--load is not given"
        logger.info("%s: training starts from %s", reason, a.load)


def _gpus(a: Namespace) -> None:
    if a.debug_rollout_only:
        _gpus_of_rollout_only(a)
    elif a.rollout_num_gpus is None and a.debug_train_only:
        a.rollout_num_gpus = 0
    elif a.rollout_num_gpus is None and a.colocate:
        a.rollout_num_gpus = a.actor_num_nodes * a.actor_num_gpus_per_node
    a.world_size, a.rank = a.actor_num_nodes * a.actor_num_gpus_per_node, 0
    a.rollout_external, a.rollout_external_engine_infos = a.rollout_external_engine_addrs is not None, None
    a.use_critic = a.advantage_estimator == "ppo"
    a.critic_num_nodes, a.critic_num_gpus_per_node = a.actor_num_nodes, a.actor_num_gpus_per_node


def _gpus_of_rollout_only(a: Namespace) -> None:
    """Without training, the placement group is as large as the engines need."""
    if a.rollout_num_gpus is None:
        a.rollout_num_gpus = a.actor_num_nodes * a.actor_num_gpus_per_node
    a.actor_num_gpus_per_node = min(GPUS_PER_NODE_LIMIT, a.rollout_num_gpus)
    a.actor_num_nodes = a.rollout_num_gpus // a.actor_num_gpus_per_node if a.actor_num_gpus_per_node else 0
    a.colocate = False


def _offload(a: Namespace, given: Mapping[str, str]) -> None:
    """Both offloads follow --colocate on CUDA, the trainers' also a critic, which takes turns with the actor.

    A CPU has no memory to hand over, and asking for it is a problem.
    """
    if a.offload:
        a.offload_train = True if a.offload_train is None else a.offload_train
        a.offload_rollout = True if a.offload_rollout is None else a.offload_rollout
    if a.debug_rollout_only:
        a.offload_train = a.offload_rollout = False
    cuda = a.accelerator != "cpu"
    a.offload_train = cuda and (a.colocate or a.use_critic) if a.offload_train is None else a.offload_train
    a.offload_rollout = cuda and a.colocate if a.offload_rollout is None else a.offload_rollout
    if a.offload_train:
        a.disable_grad_buffers_cpu_backup = a.disable_param_buffers_cpu_backup = True


def _batches(a: Namespace) -> None:
    if a.num_steps_per_rollout and a.rollout_batch_size and a.global_batch_size is None:
        a.global_batch_size = a.rollout_batch_size * a.n_samples_per_prompt // a.num_steps_per_rollout
    if a.over_sampling_batch_size is None:
        a.over_sampling_batch_size = a.rollout_batch_size
    if a.balance_by_flops:
        a.balance_data = True


def _algorithm(a: Namespace) -> None:
    if a.eps_clip_high is None:
        a.eps_clip_high = a.eps_clip
    if a.eval_reward_key is None:
        a.eval_reward_key = a.reward_key
    if a.n_samples_per_prompt == 1:
        a.grpo_std_normalization = False
    if a.eval_function_path is None:
        a.eval_function_path = a.rollout_function_path


def _evaluation(a: Namespace, given: Mapping[str, str]) -> list[Problem]:
    """Resolve the evaluation data sets; `eval_prompt_data` becomes the flat [name, path, ...] list of what runs.

    A flag whose value is illegal is a problem of that flag, not of each data set that would take it over.
    """
    from slime.utils.eval_config import eval_datasets_from_args

    flag = "--eval-config" if a.eval_config else "--eval-prompt-data"
    broken = {flag for check in CHECKS_OF_SAMPLING for problem in check(a, given) for flag in problem.flags}
    illegal = [dest for dest in SAMPLING if given.get(dest, "--" + dest.replace("_", "-")) in broken]
    try:
        a.eval_datasets = eval_datasets_from_args(Namespace(**{**vars(a), **dict.fromkeys(illegal)}))
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        a.eval_datasets = []
        return [Problem((flag,), str(error))]
    a.eval_prompt_data = [text for data in a.eval_datasets for text in (data.name, data.path)] or None
    return []


def _context_length(a: Namespace) -> None:
    if a.eval_max_context_len is None:
        a.eval_max_context_len = a.rollout_max_context_len
    if a.rollout_max_context_len is not None and a.rollout_max_prompt_len is None:
        a.rollout_max_prompt_len = a.rollout_max_context_len - 1


def _megatron(a: Namespace, given: Mapping[str, str]) -> None:
    """What slime decides for Megatron, whatever its defaults are."""
    for dropout in ("attention_dropout", "hidden_dropout"):
        if dropout not in given:
            setattr(a, dropout, 0.0)
    a.use_distributed_optimizer = True
    a.ckpt_assume_constant_structure = a.ckpt_fully_parallel_load = True
    if a.seq_length is None:
        a.seq_length = SEQ_LENGTH
    if a.max_position_embeddings is None:
        a.max_position_embeddings = a.seq_length
    if a.rope_type is None:
        a.rope_type = "yarn" if a.multi_latent_attention else "rope"
    if a.tokenizer_model is None and a.hf_checkpoint is not None:
        a.tokenizer_type, a.tokenizer_model = "HuggingFaceTokenizer", a.hf_checkpoint
    if a.moe_token_dispatcher_type == "allgather":
        a.moe_token_dispatcher_type = "alltoall"  # the all-gather dispatcher cannot take variable lengths
    a.variable_seq_lengths = True
    model_parallel = a.tensor_model_parallel_size * a.pipeline_model_parallel_size * a.context_parallel_size
    a.data_parallel_size = max(1, a.world_size // max(1, model_parallel))


def _context_parallel(a: Namespace, given: Mapping[str, str]) -> list[Problem]:
    """How context-parallel ranks exchange keys and values: gathered for sparse attention and under --allgather-cp."""
    if a.context_parallel_size <= 1:
        return []
    a.allgather_cp = a.allgather_cp or uses_sparse_attention(a)
    if not a.allgather_cp:
        return []
    asked = [kind.replace("_", "") for kind in a.cp_comm_type or ()]
    a.cp_comm_type = ["all_gather"]
    if "cp_comm_type" in given and set(asked) != {"allgather"}:
        cause = given.get("allgather_cp", "the model's sparse attention")
        says = f"is {' '.join(asked)}, and {cause} exchanges keys and values by all_gather"
        return [Problem((given["cp_comm_type"],), says, "--cp-comm-type all_gather")]
    return []


def decisions(a: Namespace, given: Mapping[str, str]) -> list[str]:
    """Sentences about what was decided for the user and changes how the run works. a: the completed draft."""
    if a.context_parallel_size > 1 and a.allgather_cp and "allgather_cp" not in given:
        why = f"sparse attention over --context-parallel-size {a.context_parallel_size} gathers keys"
        return [f"--allgather-cp is on: {why}"]
    return []


def _engines(a: Namespace) -> None:
    """Each SGLang size has a long and a short name, both are set; an engine's GPUs are tensor x pipeline parallel."""
    a.sglang_tp_size = a.rollout_num_gpus_per_engine // max(1, a.sglang_pp_size)
    long_names = {
        "tp": "tensor_parallel",
        "dp": "data_parallel",
        "pp": "pipeline_parallel",
        "ep": "expert_parallel",
        "moe_dp": "moe_data_parallel",
    }
    for short, long in long_names.items():
        setattr(a, f"sglang_{long}_size", getattr(a, f"sglang_{short}_size"))


def _default_log_dir(save: str | None) -> str:
    return str(Path(save) / "logs") if save else str(Path(tempfile.gettempdir()) / f"slime-logs-{os.getpid()}")
