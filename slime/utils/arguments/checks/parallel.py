"""Rules of Megatron's parallel layout."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.flag import Problem


def check_world(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """tp x pp x cp tile the training GPUs, and so do the experts' etp x ep x pp."""
    if a.debug_rollout_only:
        return
    tp, pp, cp, world = _sizes(a)
    made = f"--actor-num-nodes {a.actor_num_nodes} x --actor-num-gpus-per-node {a.actor_num_gpus_per_node}"
    gpus = f"the {world} training GPUs ({made})"
    tile = tp * pp * cp
    if tile < 1 or world % tile:
        says = f"tensor {tp} x pipeline {pp} x context {cp} = {tile} does not divide {gpus}"
        flags = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
        yield Problem(flags, says, f"--tensor-model-parallel-size {_largest_divisor(world, tp)} with the others 1")
    if a.num_experts:
        etp, ep = a.expert_tensor_parallel_size or tp, a.expert_model_parallel_size
        tile = etp * ep * pp
        if tile < 1 or world % tile:
            says = f"expert tensor {etp} x expert {ep} x pipeline {pp} = {tile} does not divide {gpus}"
            legal = _largest_divisor(max(1, world // (etp * pp)), ep)
            yield Problem(("--expert-model-parallel-size",), says, f"--expert-model-parallel-size {legal}")


def check_tensor_parallel(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Attention heads, key/value groups and vocabulary split evenly over tensor-parallel ranks."""
    tp = a.tensor_model_parallel_size
    heads = a.num_attention_heads
    groups = a.num_query_groups if a.group_query_attention else None
    if a.debug_rollout_only or tp <= 1 or not heads:
        return
    if heads % tp:
        says = f"{tp} does not divide the {heads} attention heads (--num-attention-heads)"
        yield Problem(
            ("--tensor-model-parallel-size",), says, f"--tensor-model-parallel-size {_largest_divisor(heads, tp)}"
        )
    if groups and groups % tp and tp % groups:
        says = f"{tp} is neither a divisor nor a multiple of the {groups} key/value groups (--num-query-groups)"
        yield Problem(
            ("--tensor-model-parallel-size",), says, f"--tensor-model-parallel-size {_largest_divisor(groups, tp)}"
        )
    if a.padded_vocab_size and a.padded_vocab_size % tp:
        legal = -(-a.padded_vocab_size // tp) * tp
        says = f"{a.padded_vocab_size} is not a multiple of --tensor-model-parallel-size {tp}"
        yield Problem(("--padded-vocab-size",), says, f"--padded-vocab-size {legal}")


def check_sequence_parallel(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Megatron trains experts under tensor parallelism only with sequence parallelism."""
    tp = a.tensor_model_parallel_size
    if not a.debug_rollout_only and tp > 1 and a.num_experts and not a.sequence_parallel:
        says = f"--num-experts {a.num_experts} with --tensor-model-parallel-size {tp} needs it"
        yield Problem(("--sequence-parallel",), says, "--sequence-parallel")


def check_pipeline(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Layers split evenly over pipeline stages, unless a layout says otherwise."""
    pp, layers = a.pipeline_model_parallel_size, a.num_layers
    if a.debug_rollout_only or not layers:
        return
    first, last = a.decoder_first_pipeline_num_layers, a.decoder_last_pipeline_num_layers
    uneven = [(flag, n) for flag, n in zip(("first", "last"), (first, last), strict=True) if n is not None]
    if pp == 1:
        for which, _ in uneven:
            flag = f"--decoder-{which}-pipeline-num-layers"
            yield Problem((flag,), "has no meaning with --pipeline-model-parallel-size 1; leave it out")
        return
    if (
        a.pipeline_model_parallel_layout
        or a.account_for_embedding_in_pipeline_split
        or a.account_for_loss_in_pipeline_split
    ):
        return
    stages, rest = pp - len(uneven), layers - sum(n for _, n in uneven)
    terms = f"{layers} layers" + "".join(f" - {n} on the {which} stage" for which, n in uneven)
    if rest < stages or (stages and rest % stages) or (not stages and rest):
        says = f"{terms} = {rest} do not divide into {stages} equal stages"
        legal = _largest_divisor(layers, pp)
        yield Problem(
            ("--pipeline-model-parallel-size",),
            says,
            f"--pipeline-model-parallel-size {legal}, or other first and last stages",
        )


def check_experts(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Experts split evenly over expert-parallel ranks."""
    if a.debug_rollout_only or not a.num_experts:
        return
    ep = a.expert_model_parallel_size
    if ep >= 1 and a.num_experts % ep:
        says = f"{ep} does not divide the {a.num_experts} experts (--num-experts)"
        yield Problem(
            ("--expert-model-parallel-size",),
            says,
            f"--expert-model-parallel-size {_largest_divisor(a.num_experts, ep)}",
        )
    if a.moe_router_topk > a.num_experts:
        says = f"{a.moe_router_topk} is more than the {a.num_experts} experts (--num-experts)"
        yield Problem(("--moe-router-topk",), says, f"--moe-router-topk {a.num_experts}")


def check_allgather_cp(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The all-gather layout of context parallelism is not implemented; without CP the flag changes nothing."""
    if a.allgather_cp and a.context_parallel_size > 1:
        says = f"is not supported yet with --context-parallel-size {a.context_parallel_size}; leave it out"
        yield Problem(("--allgather-cp",), says)


def _sizes(a: Namespace) -> tuple[int, int, int, int]:
    return a.tensor_model_parallel_size, a.pipeline_model_parallel_size, a.context_parallel_size, a.world_size


def _largest_divisor(number: int, at_most: int) -> int:
    return next((d for d in range(min(number, at_most), 0, -1) if number % d == 0), 1)


CHECKS = (
    check_world,
    check_tensor_parallel,
    check_sequence_parallel,
    check_pipeline,
    check_experts,
    check_allgather_cp,
)
