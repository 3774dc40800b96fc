"""Rules of pipeline stages: which layers they hold, multi-token prediction at their end, top-k indices within them.

The arithmetic is slime.utils.layout's; here it becomes problems.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.checks.common import Check, first_of, is_interleaved, model_config, of_engines, of_trainer
from slime.utils.arguments.flag import Problem
from slime.utils.arguments.hf_config import uses_sparse_attention
from slime.utils.layout.divisors import divisors, largest_divisor
from slime.utils.layout.engine_stages import PARTITION_VARIABLE, engine_stages
from slime.utils.layout.errors import LayoutError
from slime.utils.layout.index_sharing import (
    IndexSharing,
    illegal_engine_starts,
    illegal_starts,
    index_sharing,
    index_sharing_of_config,
    index_sharing_of_engine,
    legal_splits,
)
from slime.utils.layout.moe_layers import moe_layer_pattern
from slime.utils.layout.pipeline import FIRST, LAST, LAYOUT, PP, pipeline_layout
from slime.utils.layout.sparse_kernels import PLAIN, why_not
from slime.utils.layout.splits import balanced_counts
from slime.utils.layout.stage_string import stage_string

SHOWN_SPLITS = 4
LARGEST_SCORES = 1 << 30  # bytes of float32 scores of all pairs of tokens that the indexer's dense loss may take
ROTARY_FOR_MTP = ("rope", "none")


@of_trainer
def check_stages(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The layers split over the (virtual) stages as Megatron splits them."""
    if not a.num_layers or a.num_layers < 1:
        return  # the model is not described: another problem
    try:
        pipeline_layout(a)
    except LayoutError as error:
        yield _problem(error)
    group = a.microbatch_group_size_per_vp_stage
    if group is not None and is_interleaved(a) and group < a.pipeline_model_parallel_size:
        flag = "--microbatch-group-size-per-virtual-pipeline-stage"
        says = f"{group} is less than {PP} {a.pipeline_model_parallel_size}: the first stage would wait for the last"
        yield Problem((flag,), says, f"{flag} {a.pipeline_model_parallel_size}")


@of_trainer
def check_expert_layers(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """--moe-layer-freq describes each layer of the model."""
    if a.num_experts and a.num_layers and a.num_layers > 0:
        try:
            moe_layer_pattern(a.moe_layer_freq, a.num_layers)
        except LayoutError as error:
            yield _problem(error)


@of_trainer
def check_index_sharing(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Top-k indices do not cross stages: each stage of the trainer starts on a layer that computes its own."""
    if not uses_sparse_attention(a) or not a.num_layers or a.num_layers < 1:
        return
    try:
        sharing = index_sharing(a)
    except LayoutError as error:
        yield _problem(error)
        return
    if sharing is None:
        return  # config.json tells of sparse attention, and was not understood: reported as such
    try:
        wrong = illegal_starts(pipeline_layout(a), sharing)
    except LayoutError:
        return  # reported as such
    if not wrong:
        return
    pp = a.pipeline_model_parallel_size
    starts = ", ".join(f"stage {chunk.pp_rank} on layer {chunk.layers[0]}" for chunk in wrong[:SHOWN_SPLITS])
    says = (
        f"{starts}{', ...' if len(wrong) > SHOWN_SPLITS else ''} (counted from 0) would start on a layer that reuses "
        f"another layer's top-k (frequency {a.dsa_indexer_topk_freq}, offset {a.dsa_indexer_skip_topk_offset})"
    )
    splits = [] if is_interleaved(a) else legal_splits(sharing, a.num_layers, pp)
    if splits and a.pipeline_model_parallel_layout is None:
        shown = ", ".join(f"{first}/{last}" for first, last in splits[:SHOWN_SPLITS])
        says += f"; legal first/last stages for {PP} {pp}: {shown}"
    flags = tuple(flag for flag in (PP, FIRST, LAST, LAYOUT) if flag == PP or _given(a, flag))
    yield Problem(flags, says, _legal_stages(a, sharing, splits))


def _legal_stages(a: Namespace, sharing: IndexSharing, splits: list[tuple[int, int]]) -> str:
    """Flags of a pipeline whose stages all start on computing layers, as like the one that was asked for as can be."""
    pp, layers = a.pipeline_model_parallel_size, a.num_layers
    if a.pipeline_model_parallel_layout is not None:
        counts = balanced_counts(layers, pp, sharing.computes)
        return f"{LAYOUT} {stage_string(counts, a.mtp_num_layers or 0)}" if counts else f"leave {LAYOUT} out"
    if splits:
        return f"{FIRST} {splits[0][0]} {LAST} {splits[0][1]}"
    fewer = [] if is_interleaved(a) else [size for size in range(pp, 1, -1) if legal_splits(sharing, layers, size)]
    if not fewer:
        return f"{PP} 1"
    first, last = legal_splits(sharing, layers, fewer[0])[0]
    return f"{PP} {fewer[0]} {FIRST} {first} {LAST} {last}"


@of_trainer
def check_index_sharing_of_checkpoint(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The trainer shares indices as config.json says, which decides where the checkpoint has indexer weights.

    Contradictions within config.json are reported where it is read.
    """
    config = model_config(a)
    if config.get("num_hidden_layers") is None or not uses_sparse_attention(a):
        return
    try:
        theirs, mine = index_sharing_of_config(config), index_sharing(a)
    except LayoutError:
        return  # each side's own contradiction, reported as such
    if theirs is None or mine is None or len(mine.computes) != len(theirs.computes):
        return
    if theirs == mine:
        return
    layer = next(i for i, (x, y) in enumerate(zip(mine.computes, theirs.computes, strict=True)) if x != y)
    has = "has" if theirs.computes[layer] else "has no"
    says = (
        f"{a.dsa_indexer_topk_freq} and {a.dsa_indexer_skip_topk_offset} let layer {layer} (counted from 0) "
        f"{'compute its own top-k' if mine.computes[layer] else 'reuse the top-k of an earlier layer'}, "
        f"and by config.json the checkpoint {has} indexer weights there"
    )
    freq, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 0)
    legal = f"--dsa-indexer-topk-freq {freq} --dsa-indexer-skip-topk-offset {offset}"
    yield Problem(("--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset"), says, legal)


@of_engines
def check_engine_stages(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The engines' pipeline stages start on computing layers too; SGLang cuts them evenly."""
    config, pp = model_config(a), a.sglang_pp_size
    layers = first_of(config, "num_hidden_layers") or a.num_layers
    if pp <= 1 or not layers:
        return
    if pp > layers:
        says = f"{pp} stages for {layers} layers"
        legal = largest_divisor(a.rollout_num_gpus_per_engine, layers)
        yield Problem(("--sglang-pp-size",), says, f"--sglang-pp-size {legal}")
        return
    partition = a.sglang_pp_layer_partition
    try:
        stages = engine_stages(layers, pp, partition)
    except LayoutError as error:
        yield _problem(error)
        return
    try:
        sharing = index_sharing_of_engine(config) if config else index_sharing(a)
    except LayoutError:
        return  # a contradiction of config.json, reported as such
    if sharing is None or len(sharing.computes) != layers:
        return
    wrong = illegal_engine_starts(stages, sharing)
    if wrong:
        fits = [d for d in divisors(a.rollout_num_gpus_per_engine) if d < pp]
        fits = [d for d in fits if not illegal_engine_starts(engine_stages(layers, d), sharing)]
        starts = ", ".join(f"stage {rank} on layer {stages[rank][0]}" for rank in wrong[:SHOWN_SPLITS])
        says = f"{pp}: {starts} (counted from 0) would start on a layer that reuses another layer's top-k"
        even = balanced_counts(layers, pp, sharing.computes)
        if even and len(even) == pp:
            says += (
                f"; the environment variable {PARTITION_VARIABLE}={','.join(map(str, even))} would cut them legally"
            )
        yield Problem(("--sglang-pp-size",), says, f"--sglang-pp-size {max(fits, default=1)}")


@of_trainer
def check_sparse_attention(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """What Megatron's sparse attention asks of the rest: its layers, its kernels, and what trains the indexer."""
    if not uses_sparse_attention(a):
        return
    for flag, value in (
        ("--dsa-indexer-n-heads", a.dsa_indexer_n_heads),
        ("--dsa-indexer-head-dim", a.dsa_indexer_head_dim),
        ("--dsa-indexer-topk", a.dsa_indexer_topk),
    ):
        if value is not None and value < 1:
            yield Problem((flag,), f"is {value}, must be at least 1", f"leave {flag} out")
    if a.add_bias_linear:
        says = "sparse attention absorbs its projections into one another, which have no biases then"
        yield Problem(("--experimental-attention-variant",), says, "--disable-bias-linear")
    if (
        a.dsa_indexer_rope_interleaved
        and a.checkpoint_facts
        and "dsa_indexer_rope_interleaved" not in a.checkpoint_facts
    ):
        says = (
            "the checkpoint's indexer rotates halves (indexer_rope_interleave in config.json, or its family's default)"
        )
        yield Problem(("--dsa-indexer-rope-interleaved",), says, "leave --dsa-indexer-rope-interleaved out")
    yield from _kernels(a)
    yield from _indexer_training(a)


def _kernels(a: Namespace) -> Iterator[Problem]:
    """A named backend must fit; without a name trainers take the best that does."""
    kernels = a.dsa_kernel_backend
    described = None not in (a.kv_lora_rank, a.num_attention_heads, a.dsa_indexer_topk)
    if kernels == PLAIN or not described:
        return
    says = "its kernels need a GPU" if a.accelerator == "cpu" else why_not(kernels, a)
    if says:
        yield Problem(("--dsa-kernel-backend",), f"{kernels}: {says}", "leave --dsa-kernel-backend out")


def _indexer_training(a: Namespace) -> Iterator[Problem]:
    coefficient, flag = a.dsa_indexer_loss_coeff or 0.0, "--dsa-indexer-loss-coeff"
    if coefficient < 0:
        yield Problem((flag,), f"is {coefficient:g}, must be >= 0 (0: the indexer is frozen)", f"{flag} 1.0")
    if coefficient > 0 and a.freeze_indexer:
        says = f"{flag} {coefficient:g} trains the indexer, --freeze-indexer keeps it as it is"
        yield Problem((flag, "--freeze-indexer"), says, f"leave {flag} out")
    if coefficient > 0 and not a.dsa_indexer_use_sparse_loss:
        heads, cp = a.num_attention_heads or 0, a.context_parallel_size
        tokens = a.max_tokens_per_gpu or a.seq_length or 0
        size = 4 * heads // max(1, a.tensor_model_parallel_size) * tokens * tokens * cp
        if size > LARGEST_SCORES:
            says = (
                f"{coefficient:g} compares the attention to all tokens: several float32 tensors of {heads} heads / "
                f"{a.tensor_model_parallel_size} x {tokens:,} tokens x {tokens:,} x context parallel {cp} = "
                f"{size / 1e9:.1f} GB each; over the chosen tokens alone there are none"
            )
            yield Problem((flag,), says, "--dsa-indexer-use-sparse-loss")
    if coefficient > 0 and a.calculate_per_token_loss:
        says = f"{flag} {coefficient:g} is a mean over all tokens of a micro-batch, and --calculate-per-token-loss "
        says += "divides every gradient by the response tokens of the step: not supported yet"
        yield Problem((flag, "--calculate-per-token-loss"), says, f"leave {flag} out", kind="unsupported")


@of_trainer
def check_mtp(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Multi-token prediction: as many layers as the checkpoint has, trained only where they can be."""
    layers, flag, repeat = a.mtp_num_layers or 0, "--mtp-num-layers", "--mtp-use-repeated-layer"
    if a.enable_mtp_training and not layers:
        said = "not given" if a.mtp_num_layers is None else a.mtp_num_layers
        says = f"trains the layers of multi-token prediction, and --mtp-num-layers is {said}"
        yield Problem(("--enable-mtp-training",), says, f"{flag} 1")
    config = model_config(a)
    there = first_of(config, "num_nextn_predict_layers", "mtp_num_hidden_layers")
    built = min(layers, 1) if a.mtp_use_repeated_layer else layers
    if built > 0 and config and built > (there or 0):
        says = f"{layers} is more than the checkpoint has: {there or 0} (num_nextn_predict_layers in config.json)"
        says += f"; {repeat} runs it {layers} times" if there == 1 else ""
        yield Problem((flag,), says, f"{flag} {there}" if there else f"leave {flag} out")
    if a.mtp_use_repeated_layer and not layers:
        says = f"runs one prediction layer {flag} times, and that is not given"
        yield Problem((repeat,), says, f"{flag} 2")
    if a.mtp_use_repeated_layer and layers and (there or 0) > 1:
        says = f"runs one prediction layer {layers} times, and the checkpoint has {there} different ones"
        yield Problem((repeat,), says, f"leave {repeat} out")
    if layers > 0 and a.position_embedding_type not in ROTARY_FOR_MTP and not a.use_rotary_position_embeddings:
        says = f"{a.position_embedding_type} does not go with {flag} {layers}"
        yield Problem(("--position-embedding-type",), says, "--position-embedding-type rope")
    if a.mtp_loss_scaling_factor < 0:
        says = f"is {a.mtp_loss_scaling_factor:g}, must be >= 0"
        yield Problem(("--mtp-loss-scaling-factor",), says, "--mtp-loss-scaling-factor 0.2")
    if a.enable_mtp_training and a.mtp_loss_scaling_factor == 0:
        says = "is 0: weight decay alone would move the prediction layers; without --enable-mtp-training they stay"
        yield Problem(("--mtp-loss-scaling-factor", "--enable-mtp-training"), says, "--mtp-loss-scaling-factor 0.2")
    if built > 1 and uses_sparse_attention(a):
        says = f"{layers} with sparse attention: the published models have one, which chooses its own top-k"
        yield Problem((flag,), says, f"{flag} 1")
    if layers > 0:
        yield from _mtp_in_stages(a, flag)


def _mtp_in_stages(a: Namespace, flag: str) -> Iterator[Problem]:
    """Where prediction layers sit among the stages, and what reaches them there."""
    pp, reduce = a.pipeline_model_parallel_size, "--overlap-grad-reduce"
    if pp > 1 and a.overlap_grad_reduce:
        says = (
            f"with {PP} {pp} and {flag} the last stage has a copy of the embedding that gets no gradient of its own, "
        )
        says += "for which the overlapped reduction would wait"
        yield Problem((reduce, flag), says, f"leave {reduce} out", kind="unsupported")
    if not a.enable_mtp_training:
        return
    rows, recompute = a.recompute_num_layers, "--recompute-num-layers"
    if a.recompute_granularity == "full" and a.recompute_method == "uniform" and rows not in (None, 1):
        says = f"{rows}: Megatron recomputes prediction layers one by one"
        yield Problem((recompute, "--enable-mtp-training"), says, f"{recompute} 1")
    try:
        chunks = pipeline_layout(a).chunks
    except LayoutError:
        return  # reported as such
    if any(chunk.mtp_layers and not chunk.head for chunk in chunks):
        says = "puts the prediction layers (m) on another stage than the loss (L), where their loss is computed"
        yield Problem((LAYOUT, "--enable-mtp-training"), says, f"leave {LAYOUT} out", kind="unsupported")


def _problem(error: LayoutError) -> Problem:
    return Problem(error.flags, error.says, error.try_)


def _given(a: Namespace, flag: str) -> bool:
    return getattr(a, flag.removeprefix("--").replace("-", "_")) is not None


CHECKS: tuple[Check, ...] = (
    check_stages,
    check_expert_layers,
    check_index_sharing,
    check_index_sharing_of_checkpoint,
    check_engine_stages,
    check_sparse_attention,
    check_mtp,
)
