"""Rules of run length and batch arithmetic."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.checks.common import is_interleaved, round_up
from slime.utils.arguments.flag import Problem
from slime.utils.layout.divisors import largest_divisor

AT_LEAST_ONE = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "n_samples_per_eval_prompt",
    "global_batch_size",
    "micro_batch_size",
    "num_epoch",
    "num_steps_per_rollout",
    "max_tokens_per_gpu",
    "save_interval",
    "eval_interval",
    "over_sampling_batch_size",
    "rollout_max_response_len",
    "rollout_max_context_len",
    "rollout_max_prompt_len",
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "rollout_num_gpus_per_engine",
    "num_gpus_per_node",
    "sglang_server_concurrency",
    "data_pad_size_multiplier",
    "update_weight_buffer_size",
    "ref_update_interval",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "vocab_size",
    "padded_vocab_size",
)
NOT_NEGATIVE = ("num_rollout", "rollout_num_gpus", "start_rollout_id", "num_experts", "mtp_num_layers")


def check_ranges(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Counts and sizes are at least 1, and a few at least 0."""
    for names, least in ((AT_LEAST_ONE, 1), (NOT_NEGATIVE, 0)):
        for name in names:
            value = getattr(a, name)
            if a.debug_rollout_only and name.startswith("actor_num_"):
                continue  # derived from the engines' GPUs, of which there may be none
            if name in given and value is not None and value < least:
                yield Problem((given[name],), f"is {value}, must be at least {least}")


def check_run_length(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The number of rollouts is given, directly or as epochs over the data source."""
    if a.num_rollout is None and a.num_epoch is None:
        yield Problem(("--num-rollout", "--num-epoch"), "the length of the run is not given", "--num-rollout 100")
    elif a.num_rollout is None and not a.rollout_global_dataset:
        says = "epochs need slime's data set, which --disable-rollout-global-dataset turns off"
        yield Problem(("--num-epoch",), says, "--num-rollout 100")


def check_batch_identity(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A rollout's responses divide into whole optimizer steps."""
    if a.debug_rollout_only or a.num_rollout == 0 or not (a.rollout_batch_size and a.n_samples_per_prompt):
        return
    responses, steps = a.rollout_batch_size * a.n_samples_per_prompt, a.num_steps_per_rollout
    made = (
        f"--rollout-batch-size {a.rollout_batch_size} x --n-samples-per-prompt {a.n_samples_per_prompt} = {responses}"
    )
    if steps and responses % steps:
        says = f"{made} responses do not divide into {steps} steps"
        whole = "global_batch_size" in given and a.global_batch_size > 0 and responses % a.global_batch_size == 0
        legal = responses // a.global_batch_size if whole else largest_divisor(responses, steps)
        yield Problem(("--num-steps-per-rollout",), says, f"--num-steps-per-rollout {legal}")
        return
    if steps and a.global_batch_size != responses // steps:
        each, stated = responses // steps, a.global_batch_size
        says = f"{made} responses / {steps} steps = {each} per step, but --global-batch-size is {stated}"
        yield Problem(
            ("--global-batch-size", "--num-steps-per-rollout"), says, f"--global-batch-size {responses // steps}"
        )
        return
    if not a.global_batch_size:
        says = f"is not given; it is the number of responses per optimizer step ({made} per rollout)"
        yield Problem(("--global-batch-size",), says, f"--global-batch-size {responses}")
    elif responses < a.global_batch_size:
        if a.num_rollout is not None:
            made += f" per rollout (x --num-rollout {a.num_rollout} = {responses * a.num_rollout} in all)"
        says = f"{made}; {responses} // {a.global_batch_size} = 0 optimizer steps"
        yield Problem(("--global-batch-size",), says, f"--global-batch-size {responses}")
    elif responses % a.global_batch_size:
        rest = responses % a.global_batch_size
        says = f"{made} responses are not a multiple of {a.global_batch_size}: {rest} of each rollout would go unused"
        yield Problem(
            ("--global-batch-size",), says, f"--global-batch-size {largest_divisor(responses, a.global_batch_size)}"
        )


def check_micro_batches(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Every data-parallel rank gets the same number of micro-batches in each step."""
    if a.debug_rollout_only or not a.global_batch_size or not a.micro_batch_size:
        return
    group = _micro_batch_group(a)
    unit = a.data_parallel_size * group
    terms = f"{a.data_parallel_size} data-parallel ranks" + (
        f" x {group} micro-batches per virtual stage" if group > 1 else ""
    )
    if a.use_dynamic_batch_size or a.balance_by_flops:
        if a.global_batch_size < unit:
            says = f"{a.global_batch_size} samples < {terms} = {unit}: some rank would have nothing to train on"
            yield Problem(
                ("--global-batch-size",), says, f"--global-batch-size {unit}, with a --rollout-batch-size to match"
            )
        return
    if a.global_batch_size % (unit * a.micro_batch_size):
        sums = f"--micro-batch-size {a.micro_batch_size} x {terms} = {unit * a.micro_batch_size}"
        says = f"{a.global_batch_size} is not a multiple of {sums}"
        yield Problem(("--global-batch-size",), says, f"{_legal_static_batch(a, unit)}, or --use-dynamic-batch-size")


def _legal_static_batch(a: Namespace, unit: int) -> str:
    """The largest micro-batch, or else step, that gives each of `unit` micro-batches as many samples."""
    if a.global_batch_size % unit == 0:
        return f"--micro-batch-size {largest_divisor(a.global_batch_size // unit, a.micro_batch_size)}"
    whole = round_up(a.global_batch_size, unit * a.micro_batch_size)
    return f"--global-batch-size {whole}, with a --rollout-batch-size to match"


def check_sampling_batches(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Dynamic batches have a size, and a refill is at least one batch."""
    if a.use_dynamic_batch_size and a.max_tokens_per_gpu is None:
        says = "--use-dynamic-batch-size packs up to this many tokens, but it is not given"
        yield Problem(("--max-tokens-per-gpu",), says, "--max-tokens-per-gpu 8192")
    if a.balance_by_flops and not a.use_dynamic_batch_size:
        yield Problem(
            ("--balance-by-flops",),
            "needs --use-dynamic-batch-size",
            "--use-dynamic-batch-size --max-tokens-per-gpu 8192",
        )
    size, batch = a.over_sampling_batch_size, a.rollout_batch_size
    if size is not None and batch is not None and size < batch:
        says = f"{size} is less than --rollout-batch-size {batch}"
        yield Problem(("--over-sampling-batch-size",), says, f"--over-sampling-batch-size {batch}")


def _micro_batch_group(a: Namespace) -> int:
    if not is_interleaved(a) or a.pipeline_model_parallel_size == 1:
        return 1
    return a.microbatch_group_size_per_vp_stage or a.pipeline_model_parallel_size


CHECKS = (
    check_ranges,
    check_run_length,
    check_batch_identity,
    check_micro_batches,
    check_sampling_batches,
)
