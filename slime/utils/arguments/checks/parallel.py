"""Rules of Megatron's parallel layout: sizes that tile the training GPUs, and dimensions that split over them."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.checks.common import head_dim, kv_groups, model_config, of_trainer, round_up
from slime.utils.arguments.flag import Problem
from slime.utils.arguments.hf_config import uses_sparse_attention
from slime.utils.layout.divisors import divisors, largest_divisor

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"


@of_trainer
def check_world(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """tp x pp x cp tile the training GPUs, and so do the experts' etp x ep x pp."""
    tp, pp, cp, world = _sizes(a)
    made = f"--actor-num-nodes {a.actor_num_nodes} x --actor-num-gpus-per-node {a.actor_num_gpus_per_node}"
    gpus = f"the {world} training GPUs ({made})"
    tile = tp * pp * cp
    if min(tp, pp, cp, world) < 1:
        return  # a range problem, reported as such
    if world % tile:
        says = f"tensor {tp} x pipeline {pp} x context {cp} = {tile} does not divide {gpus}"
        legal = " ".join(
            f"{flag} {size}" for flag, size in zip((TP, PP, CP), _shrunk((tp, pp, cp), world), strict=True)
        )
        yield Problem((TP, PP, CP), says, legal)
    if a.num_experts:
        etp, ep = a.expert_tensor_parallel_size or tp, a.expert_model_parallel_size
        tile = etp * ep * pp
        if tile < 1 or world % tile:
            says = f"expert tensor {etp} x expert {ep} x pipeline {pp} = {tile} does not divide {gpus}"
            yield Problem((EP,), says, _legal_expert_sizes(a, etp, ep, pp, world))


@of_trainer
def check_heads(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Attention heads and key/value groups split evenly over tensor-parallel ranks."""
    tp, heads, groups = a.tensor_model_parallel_size, a.num_attention_heads, kv_groups(a)
    if not heads or heads < 1 or tp < 1:
        return
    fits = [d for d in divisors(heads) if d <= tp and (not groups or groups % d == 0 or d % groups == 0)]
    model_parallel = a.pipeline_model_parallel_size * a.context_parallel_size
    fits = [d for d in fits if model_parallel > 0 and a.world_size % (d * model_parallel) == 0] or fits
    legal = f"{TP} {max(fits, default=1)}"
    if tp > 1 and heads % tp:
        says = f"{tp} does not divide the {heads} attention heads (--num-attention-heads)"
        yield Problem((TP,), says, legal)
    if tp > 1 and groups and groups % tp and tp % groups:
        says = f"{tp} is neither a divisor nor a multiple of the {groups} key/value groups (--num-query-groups)"
        yield Problem((TP,), says, legal)
    if a.group_query_attention and groups and heads % groups:
        says = f"{groups} does not divide the {heads} attention heads (--num-attention-heads)"
        yield Problem(("--num-query-groups",), says, f"--num-query-groups {largest_divisor(heads, groups)}")
    if a.kv_channels is None and a.hidden_size and a.hidden_size % heads:
        says = f"is not given, and --hidden-size {a.hidden_size} / --num-attention-heads {heads} is no whole number"
        yield Problem(("--kv-channels",), says, f"--kv-channels {head_dim(a)}")
    if a.multi_latent_attention and a.group_query_attention:
        says = "latent attention has no key/value groups; leave one of the two out"
        yield Problem(("--multi-latent-attention", "--group-query-attention"), says)


@of_trainer
def check_linear_attention(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Heads of a gated delta net split over tensor x context parallel ranks, its values over its keys."""
    if a.experimental_attention_variant != "gated_delta_net" and a.linear_attention_freq is None:
        return
    keys, values = a.linear_num_key_heads, a.linear_num_value_heads
    split = a.tensor_model_parallel_size * a.context_parallel_size
    if a.deterministic_mode:
        says = "gated delta nets have no deterministic kernel; leave it out"
        yield Problem(("--deterministic-mode",), says)
    if min(keys, values, split) < 1:
        for flag, heads in (("--linear-num-key-heads", keys), ("--linear-num-value-heads", values)):
            if heads < 1:
                yield Problem((flag,), f"is {heads}, must be at least 1")
        return
    if values % keys:
        says = f"{values} is not a multiple of --linear-num-key-heads {keys}"
        yield Problem(("--linear-num-value-heads",), says, f"--linear-num-value-heads {round_up(values, keys)}")
    for flag, heads in (("--linear-num-key-heads", keys), ("--linear-num-value-heads", values)):
        if heads % split:
            says = f"tensor {a.tensor_model_parallel_size} x context {a.context_parallel_size} = {split} does not "
            legal = f"{TP} {largest_divisor(heads, a.tensor_model_parallel_size)} {CP} 1"
            yield Problem((TP, CP), says + f"divide the {heads} heads of {flag}", legal)
    if a.linear_attention_freq is None:
        yield Problem(
            ("--linear-attention-freq",), "is not given; it says which layers are linear", "--linear-attention-freq 4"
        )


@of_trainer
def check_widths(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The widths of MLPs and experts split evenly over the ranks that share them."""
    tp = a.tensor_model_parallel_size
    etp = a.expert_tensor_parallel_size or tp
    rows = (
        ("--ffn-hidden-size", a.ffn_hidden_size, TP, tp),
        ("--moe-shared-expert-intermediate-size", a.moe_shared_expert_intermediate_size, TP, tp),
        ("--moe-ffn-hidden-size", a.moe_ffn_hidden_size if a.num_experts else None, ETP, etp),
    )
    for flag, width, size_flag, size in rows:
        if width and width > 0 and size > 1 and width % size:
            says = f"{size} does not divide {flag} {width}: {width} / {size} = {width / size:g} columns a rank"
            ranks = a.world_size // max(1, a.pipeline_model_parallel_size)
            legal = max(d for d in divisors(width) if d <= size and (d == 1 or ranks % d == 0))
            yield Problem((size_flag,), says, f"{size_flag} {legal}")


@of_trainer
def check_vocabulary(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The embedding has a row for every token id and splits evenly over tensor-parallel ranks."""
    tp, padded, flag = a.tensor_model_parallel_size, a.padded_vocab_size, "--padded-vocab-size"
    fact = model_config(a).get("vocab_size")
    tokens = max(filter(None, (a.vocab_size, fact)), default=0)
    if a.vocab_size and fact and a.vocab_size < fact:
        says = f"{a.vocab_size} has no rows for all token ids: vocab_size in config.json is {fact}"
        yield Problem(("--vocab-size",), says, f"--vocab-size {fact}")
    if padded and tp > 1 and padded % tp:
        says = f"{padded} is not a multiple of {TP} {tp}"
        yield Problem((flag,), says, f"{flag} {round_up(max(padded, tokens), tp)}")
    if padded and padded < tokens:
        says = f"{padded} is below the vocabulary of {tokens} tokens"
        yield Problem((flag,), says, f"{flag} {round_up(tokens, tp)}")
    if a.make_vocab_size_divisible_by < 1:
        says = f"is {a.make_vocab_size_divisible_by}, must be at least 1"
        yield Problem(("--make-vocab-size-divisible-by",), says, "--make-vocab-size-divisible-by 128")


@of_trainer
def check_sequence_parallel(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Megatron trains experts and sparse attention under tensor parallelism only with sequence parallelism."""
    tp = a.tensor_model_parallel_size
    if tp <= 1 or a.sequence_parallel:
        return
    if a.num_experts:
        says = f"--num-experts {a.num_experts} with {TP} {tp} needs it: the ranks exchange tokens, not copies of them"
        yield Problem(("--sequence-parallel",), says, "--sequence-parallel")
    elif uses_sparse_attention(a):
        says = f"sparse attention with {TP} {tp} needs it: keys and indices are gathered from the ranks' tokens"
        yield Problem(("--sequence-parallel",), says, "--sequence-parallel")
    elif a.linear_attention_freq is not None:
        says = f"linear attention with {TP} {tp} needs it: its ranks share out heads of whole sequences"
        yield Problem(("--sequence-parallel",), says, "--sequence-parallel")
    if a.tp_comm_overlap:
        says = "overlaps the communication of sequence parallelism, which is off"
        yield Problem(("--tp-comm-overlap",), says, "--sequence-parallel")


@of_trainer
def check_context_parallel(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """How keys and values are exchanged: one way, or one a layer."""
    ways = a.cp_comm_type if isinstance(a.cp_comm_type, list) else [a.cp_comm_type]
    known = ("p2p", "all_gather", "allgather", "a2a", "a2a+p2p")
    for way in dict.fromkeys(ways):
        if way not in known:
            yield Problem(("--cp-comm-type",), f"{way} is unknown; known: {', '.join(known)}", "--cp-comm-type p2p")
    if len(ways) > 1 and a.num_layers and len(ways) != a.num_layers:
        says = f"{len(ways)} values, must be 1 or one for each of the {a.num_layers} layers"
        yield Problem(("--cp-comm-type",), says, f"--cp-comm-type {ways[0]}")


def _sizes(a: Namespace) -> tuple[int, int, int, int]:
    return a.tensor_model_parallel_size, a.pipeline_model_parallel_size, a.context_parallel_size, a.world_size


def _shrunk(sizes: tuple[int, ...], world: int) -> list[int]:
    """Sizes at most as large, one after the other, whose product divides `world`."""
    legal, left = [], world
    for size in sizes:
        legal.append(largest_divisor(left, size))
        left //= legal[-1]
    return legal


def _legal_expert_sizes(a: Namespace, etp: int, ep: int, pp: int, world: int) -> str:
    """Expert sizes at most as large that tile a pipeline stage; "" when the pipeline size itself is the problem."""
    if world % pp:
        return ""
    etp_legal = largest_divisor(world // pp, etp)
    ranks = world // pp // etp_legal
    fits = [d for d in divisors(ranks) if d <= ep and a.num_experts % d == 0]
    legal = f"{EP} {max(fits, default=1)}"
    return legal if etp_legal == etp else f"{legal} {ETP} {etp_legal}"


CHECKS = (
    check_world,
    check_heads,
    check_linear_attention,
    check_widths,
    check_vocabulary,
    check_sequence_parallel,
    check_context_parallel,
)
