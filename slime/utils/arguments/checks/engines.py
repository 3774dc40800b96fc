"""Rules of SGLang engines: how an engine's GPUs divide up, whether the model does too, and what its server refuses."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping

from slime.utils.arguments.checks.common import listed, model_config, of_engines, round_up
from slime.utils.arguments.checks.engine_shape import SPANNING_BACKENDS, EngineModel, EngineShape
from slime.utils.arguments.flag import Problem
from slime.utils.layout.divisors import divisors, largest_divisor

GPUS = "--rollout-num-gpus-per-engine"


@of_engines
def check_engine_parallel(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """An engine's GPUs are its tensor-parallel x pipeline-parallel ranks; the rest shares the tensor-parallel ones."""
    each, pp, dp = a.rollout_num_gpus_per_engine, a.sglang_pp_size, a.sglang_dp_size
    if pp < 1 or each % pp:
        says = f"{pp} does not divide the {each} GPUs of an engine ({GPUS})"
        yield Problem(("--sglang-pp-size",), says, f"--sglang-pp-size {largest_divisor(each, pp)}")
        return
    tp = each // pp
    ranks = f"the {tp} tensor-parallel ranks ({GPUS} {each}" + (f" / --sglang-pp-size {pp})" if pp > 1 else ")")
    if dp > 1 and not a.sglang_enable_dp_attention:
        says = f"{dp} inside one engine means data-parallel attention"
        yield Problem(("--sglang-dp-size",), says, "--sglang-enable-dp-attention")
    if dp < 1 or tp % dp:
        says = f"{dp} does not divide {ranks}"
        yield Problem(("--sglang-dp-size",), says, f"--sglang-dp-size {largest_divisor(tp, dp)}")
    elif a.sglang_attn_cp_size < 1 or tp % (dp * a.sglang_attn_cp_size):
        cp = a.sglang_attn_cp_size
        shared = f" x --sglang-dp-size {dp} = {cp * dp}" if dp > 1 else ""
        legal = f"--sglang-attn-cp-size {largest_divisor(tp // dp, cp)}"
        yield Problem(("--sglang-attn-cp-size",), f"{cp}{shared} does not divide {ranks}", legal)
    if a.sglang_enable_dp_lm_head and not a.sglang_enable_dp_attention:
        says = "splits the output layer as data-parallel attention does, which is off"
        yield Problem(("--sglang-enable-dp-lm-head",), says, "--sglang-enable-dp-attention")
    if a.sglang_moe_dense_tp_size not in (None, 1, tp):
        says = f"{a.sglang_moe_dense_tp_size} must be 1 or {tp}, the tensor-parallel ranks of an engine"
        yield Problem(("--sglang-moe-dense-tp-size",), says, "--sglang-moe-dense-tp-size 1")
    nodes = -(-each // max(1, a.num_gpus_per_node))
    if each % nodes:
        says = f"{each} GPUs do not spread evenly over {nodes} nodes of {a.num_gpus_per_node} (--num-gpus-per-node)"
        yield Problem((GPUS,), says, f"{GPUS} {each // nodes * nodes}")


@of_engines
def check_engine_experts(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Experts spread over the engine's ranks, evenly."""
    shape, model, flag = EngineShape.of(a), EngineModel.of(a), "--sglang-ep-size"
    ep, moe_dp, tp = a.sglang_ep_size, a.sglang_moe_dp_size, shape.tp
    spanning = a.sglang_moe_a2a_backend in SPANNING_BACKENDS
    if a.sglang_moe_a2a_backend != "none" and model.experts is None and (a.hf_config or a.num_layers):
        says = f"{a.sglang_moe_a2a_backend} exchanges tokens between experts, and the model has none; leave it out"
        yield Problem(("--sglang-moe-a2a-backend",), says)
    slots = (model.experts or 0) + a.sglang_ep_num_redundant_experts
    if not spanning and (ep < 1 or ep > tp or tp % ep):
        engine = f"of an engine ({GPUS} {a.rollout_num_gpus_per_engine})"
        says = f"{ep} does not divide the {tp} tensor-parallel ranks {engine}"
        legal = max(d for d in divisors(tp) if d == 1 or (d <= ep and slots % d == 0))
        yield Problem((flag,), says, f"{flag} {legal}")
        return
    if moe_dp > 1:
        yield from _check_moe_dp(a, tp, shape.ep, moe_dp)
    if model.experts and slots % shape.ep:
        spare = round_up(slots, shape.ep) - model.experts
        extra = f" + {a.sglang_ep_num_redundant_experts} redundant" if a.sglang_ep_num_redundant_experts else ""
        cause = "--sglang-moe-a2a-backend" if spanning else flag
        says = f"{model.experts} experts{extra} do not spread evenly over {shape.ep} expert-parallel ranks"
        yield Problem((cause,), says, f"--sglang-ep-num-redundant-experts {spare}")
    if a.sglang_enable_eplb and shape.ep == 1:
        says = "moves experts between expert-parallel ranks, of which there is one"
        yield Problem(("--sglang-enable-eplb",), says, f"{flag} {tp}" if tp > 1 else "leave it out")
    if model.expert_width and model.expert_width % shape.expert_tp:
        parts = f"{shape.expert_tp} ({_expert_ranks(shape)})"
        says = f"{model.expert_width} columns of an expert do not divide into {parts}"
        yield Problem((GPUS, flag), says, _legal_ep(a, shape, model, lambda ranks: model.expert_width % ranks == 0))


def _check_moe_dp(a: Namespace, tp: int, ep: int, moe_dp: int) -> Iterator[Problem]:
    flag = "--sglang-moe-dp-size"
    if tp % moe_dp or ep * moe_dp > tp or (ep > 1 and ep * moe_dp != tp):
        says = f"{moe_dp} x {ep} expert-parallel ranks = {moe_dp * ep}, must be an engine's {tp} tensor-parallel ranks"
        yield Problem((flag,), says, f"{flag} {tp // ep if tp % ep == 0 else 1}")
    if a.sglang_pp_size > 1:
        says = f"{moe_dp} does not go with --sglang-pp-size {a.sglang_pp_size}"
        yield Problem((flag,), says, f"{flag} 1")


@of_engines
def check_engine_split(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Heads and columns split evenly over the ranks that share them; key/value heads split or are repeated."""
    shape, model = EngineShape.of(a), EngineModel.of(a)
    ranks, width = shape.attention_tp, model.dense_width
    if width and width % shape.dense_tp and not model.quantises_dense():
        says = f"{shape.dense_tp} ranks of an engine do not divide the {width} columns of a dense layer"
        yield Problem((GPUS,), says, _smaller_engine(a, lambda size: width % size == 0))
    if not model.heads or ranks <= 1:
        return

    def fits(size: int) -> bool:
        return model.heads % size == 0 and (not model.groups or model.groups % size == 0 or size % model.groups == 0)

    if fits(ranks):
        return
    what = f"{model.heads} attention heads"
    if model.groups and model.groups != model.heads:
        what += f" and {model.groups} key/value heads"
    says = f"{what} do not split over {ranks} ranks of an engine"
    yield Problem(_attention_flags(a), says, _legal_attention(a, shape, fits))


@of_engines
def check_engine_fp8_blocks(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Each rank's part of a block-quantised weight is made of whole blocks, or its scales would belong to others."""
    shape, model = EngineShape.of(a), EngineModel.of(a)
    if not model.block:
        return
    block = max(model.block)
    if model.quantises_experts() and model.expert_width % shape.expert_tp == 0:
        width, ranks = model.expert_width, shape.expert_tp
        if (width // ranks) % block:
            legal = [d for d in divisors(width) if (width // d) % block == 0]
            says = (
                f"moe_intermediate_size {width} / {ranks} = {width // ranks} is not a multiple of {block} "
                f"(weight_block_size in config.json); {_expert_ranks(shape)}; "
                f"legal TP (without EP): {listed(legal) if legal else 'none'}"
            )
            fix = _legal_ep(a, shape, model, lambda size: size in legal)
            yield Problem((GPUS, "--sglang-ep-size"), says, fix)
    if model.quantises_dense():
        yield from _check_dense_blocks(a, shape, model)
    yield from _check_attention_blocks(a, shape, model)


def _check_dense_blocks(a: Namespace, shape: EngineShape, model: EngineModel) -> Iterator[Problem]:
    width, ranks, block = model.dense_width, shape.dense_tp, max(model.block)
    if width % ranks == 0 and (width // ranks) % block == 0:
        return
    legal = [d for d in divisors(width) if (width // d) % block == 0]
    says = (
        f"intermediate_size {width} / {ranks} = {width / ranks:g} is not a multiple of {block} "
        f"(weight_block_size in config.json); legal TP: {listed(legal) if legal else 'none'}"
    )
    fix = "--sglang-moe-dense-tp-size 1" if model.experts and 1 in legal else ""
    yield Problem((GPUS,), says, fix or _smaller_engine(a, lambda size: size in legal))


def _check_attention_blocks(a: Namespace, shape: EngineShape, model: EngineModel) -> Iterator[Problem]:
    ranks = shape.attention_tp

    def fits(size: int) -> bool:
        widths = model.attention_widths(size)
        return all(width % size == 0 and (width // size) % block == 0 for _, width, block in widths)

    if ranks == 1 or fits(ranks):
        return
    for what, width, block in model.attention_widths(ranks):
        if width % ranks == 0 and (width // ranks) % block:
            says = (
                f"{what}: {width} / {ranks} = {width // ranks} is not a multiple of {block} "
                "(weight_block_size in config.json)"
            )
            yield Problem(_attention_flags(a), says, _legal_attention(a, shape, fits))
            return


def _attention_flags(a: Namespace) -> tuple[str, ...]:
    return (GPUS, "--sglang-dp-size") if a.sglang_enable_dp_attention else (GPUS,)


def _legal_attention(a: Namespace, shape: EngineShape, fits: Callable[[int], bool]) -> str:
    """Data-parallel attention that leaves each group with a number of ranks that fits; the largest such number."""
    copies = a.sglang_attn_cp_size
    sizes = [size for size in divisors(shape.tp // copies if shape.tp % copies == 0 else shape.tp) if fits(size)]
    if not sizes:
        return ""
    dp = shape.tp // copies // max(sizes)
    return f"--sglang-enable-dp-attention --sglang-dp-size {dp}"


def _legal_ep(a: Namespace, shape: EngineShape, model: EngineModel, fits: Callable[[int], bool]) -> str:
    """The smallest expert parallelism that leaves a number of ranks per expert that fits."""
    slots = (model.experts or 0) + a.sglang_ep_num_redundant_experts
    ranks = shape.tp // max(1, a.sglang_moe_dp_size)
    sizes = [ep for ep in divisors(max(1, ranks)) if ep > shape.ep and fits(ranks // ep) and slots % ep == 0]
    if sizes:
        return f"--sglang-ep-size {sizes[0]}"
    smaller = _smaller_engine(a, fits)
    return f"{smaller} --sglang-ep-size 1" if smaller else ""


def _smaller_engine(a: Namespace, fits: Callable[[int], bool]) -> str:
    """The largest engine of a part of these GPUs whose tensor-parallel ranks fit; "" when none does."""
    pp = max(1, a.sglang_pp_size)
    sizes = [d for d in divisors(a.rollout_num_gpus_per_engine) if d % pp == 0 and fits(d // pp)]
    return f"{GPUS} {max(sizes)}" if sizes else ""


def _expert_ranks(shape: EngineShape) -> str:
    return f"{shape.tp} ranks / expert parallel {shape.ep} = {shape.expert_tp} ranks an expert"


@of_engines
def check_quantised_engines(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Trained weights go to engines in the format of --hf-checkpoint, which must be one that they can take anew.

    SGLang 0.5.17 loads a pushed weight into the parameter that it had at the start. Of the quantised ones only those
    in FP8 blocks are still what the checkpoint holds; kernels for the others have replaced or repacked theirs.
    """
    config = model_config(a).get("quantization_config") or {}
    method, flag = config.get("quant_method"), a.sglang_quantization
    if method and a.accelerator == "cpu":
        says = f"config.json says quant_method {method}, and engines on the CPU compute with unquantised weights only"
        yield Problem(
            ("--hf-checkpoint",), says, f"the checkpoint in bfloat16: {_CAST.get(method, '')}", "unsupported"
        )
    if a.debug_rollout_only:
        return
    if flag is not None and flag != method:
        says = f"{flag}: engines that quantise when they start cannot take trained weights afterwards"
        yield Problem(("--sglang-quantization",), says, f"leave it out, and {_BLOCKS}", kind="unsupported")
    elif method and not (method == "fp8" and config.get("weight_block_size")):
        how = "one scale a weight" if method == "fp8" else f"quant_method {method}"
        says = f"config.json says {how}, in which engines cannot take trained weights after their start"
        yield Problem(("--hf-checkpoint",), says, _BLOCKS, kind="unsupported")
    elif method and config.get("activation_scheme", "dynamic") != "dynamic":
        scheme = config["activation_scheme"]
        says = f"config.json says activation_scheme {scheme}: training does not know the scales of activations"
        yield Problem(("--hf-checkpoint",), says, _BLOCKS, kind="unsupported")


_BLOCKS = "--hf-checkpoint in FP8 blocks, which tools/convert_hf_to_fp8.py makes of the bfloat16 one"
_CAST = {
    "fp8": "tools/fp8_cast_bf16.py makes it",
    "compressed-tensors": "tools/convert_k2_thinking_int4_to_bf16.py or tools/fp8_cast_bf16.py makes it",
}


CHECKS = (
    check_engine_parallel,
    check_engine_experts,
    check_engine_split,
    check_engine_fp8_blocks,
    check_quantised_engines,
)
