"""Rules of number formats: one training precision, and FP8 recipes whose blocks fit the weights of each rank."""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.checks.common import head_dim, kv_groups, listed, of_trainer, round_up
from slime.utils.arguments.flag import Problem
from slime.utils.layout.divisors import divisors

# Recipe -> both sides of a weight must be multiples of this: the size of a scaling block, or what FP8 products take.
BLOCKS = {"blockwise": 128, "mxfp8": 32, "tensorwise": 16, "delayed": 16, "custom": 16}
FP8_FLAGS = ("fp8_param_gather", "fp8_output_proj", "first_last_layers_bf16", "reuse_grad_buf_for_mxfp8_param_ag")


@of_trainer
def check_precision(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """One precision, and options that exist only in some of them."""
    names = ("fp32", "bf16", "fp16")
    asked = tuple(given[name] for name in names if name in given and (name == "fp32" or getattr(a, name)))
    if len(asked) > 1:
        yield Problem(asked, "give one precision", "leave all but --bf16 out")
    if a.fp32_residual_connection and a.fp32:
        says = "keeps residuals in 32 bits, and all of this run is in 32 bits; leave it out"
        yield Problem(("--fp32-residual-connection",), says)
    if a.fp16_lm_cross_entropy and not a.fp16:
        yield Problem(("--fp16-lm-cross-entropy",), "goes with --fp16 only; leave it out")
    if a.grad_reduce_in_bf16 and a.accumulate_allreduce_grads_in_fp32:
        flags = ("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32")
        yield Problem(flags, "the one adds up gradients in 16 bits, the other in 32; give one of the two")


@of_trainer
def check_fp8(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """FP8 is switched on by --fp8-format; the rest only tunes it."""
    if a.fp8 and a.fp4:
        yield Problem(("--fp8-format", "--fp4-format"), "give one of the two formats", "leave --fp4-format out")
    if not a.fp8:
        for dest in FP8_FLAGS:
            if dest in given and getattr(a, dest):
                yield Problem((given[dest],), "tunes FP8, which is off", "--fp8-format e4m3")
        return
    if a.accelerator == "cpu":
        says = f"{a.fp8} needs the FP8 units of a GPU, and this run is on a CPU (--accelerator cpu); leave it out"
        yield Problem(("--fp8-format",), says)
    if a.fp32:
        yield Problem(("--fp8-format", "--fp32"), "FP8 products go with 16-bit training", "give --bf16 instead")
    if a.transformer_impl != "transformer_engine":
        says = f"{a.transformer_impl} has no FP8"
        yield Problem(("--transformer-impl",), says, "--transformer-impl transformer_engine")
    if a.fp8_recipe == "custom" and not a.fp8_quantizer_factory:
        yield Problem(("--fp8-recipe",), "custom needs --fp8-quantizer-factory", "--fp8-recipe blockwise")
    if a.fp8_output_proj and a.fp8_recipe != "mxfp8":
        says = f"goes with --fp8-recipe mxfp8, not {a.fp8_recipe}"
        yield Problem(("--fp8-output-proj",), says, "--fp8-recipe mxfp8")
    if a.first_last_layers_bf16 and a.fp8_recipe == "delayed":
        says = "delayed scaling applies to every layer"
        yield Problem(("--first-last-layers-bf16",), says, "--fp8-recipe blockwise")
    if a.first_last_layers_bf16 and a.num_layers:
        yield from _check_bf16_ends(a)
    if a.fp8_param_gather and a.optimizer_cpu_offload and a.fp8_recipe != "delayed":
        says = f"with --fp8-recipe {a.fp8_recipe} the optimizer must be on the GPU; leave one of the two out"
        yield Problem(("--fp8-param-gather", "--optimizer-cpu-offload"), says)


def _check_bf16_ends(a: Namespace) -> Iterator[Problem]:
    most = a.num_layers // max(1, a.pipeline_model_parallel_size)
    ends = (
        ("--num-layers-at-start-in-bf16", a.num_layers_at_start_in_bf16),
        ("--num-layers-at-end-in-bf16", a.num_layers_at_end_in_bf16),
    )
    for flag, layers in ends:
        if not 0 <= layers <= most:
            made = f"--num-layers {a.num_layers} / {a.pipeline_model_parallel_size} stages"
            says = f"is {layers}, must be within 0..{most} ({made})"
            yield Problem((flag,), says, f"{flag} {min(max(layers, 0), most)}")


@of_trainer
def check_fp8_blocks(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Each rank's part of a weight is made of whole FP8 blocks."""
    if not a.fp8 or not a.num_layers:
        return
    block, recipe = BLOCKS[a.fp8_recipe], f"--fp8-recipe {a.fp8_recipe}"
    tp = a.tensor_model_parallel_size
    etp = a.expert_tensor_parallel_size or tp
    if a.hidden_size and a.hidden_size % block:
        says = f"{a.hidden_size} is not a multiple of {block}, the block of {recipe}"
        yield Problem(("--fp8-recipe",), says, _finer_recipe(a.hidden_size))
    for what, width, degree, flag in _split_widths(a, tp, etp):
        if width % degree or (width // degree) % block == 0:
            continue  # what does not divide at all is another problem
        fits = [d for d in divisors(width) if (width // d) % block == 0]
        says = f"{what}: {width} / {degree} = {width // degree} is not a multiple of {block}, the block of {recipe}"
        ranks = a.world_size // max(1, a.pipeline_model_parallel_size)
        smaller = [d for d in fits if d <= degree and ranks % d == 0]
        legal = f"{flag} {max(smaller)}" if smaller else _finer_recipe(width)
        yield Problem((flag,), says + (f"; sizes that fit: {listed(fits)}" if fits else ""), legal)
    if a.data_pad_size_multiplier % block:
        says = f"{a.data_pad_size_multiplier} tokens are not a multiple of {block}, the block of {recipe}"
        legal = f"--data-pad-size-multiplier {round_up(a.data_pad_size_multiplier, block)}"
        yield Problem(("--data-pad-size-multiplier",), says, legal)


def _split_widths(a: Namespace, tp: int, etp: int) -> Iterator[tuple[str, int, int, str]]:
    """(what, width over all ranks, ranks that share it, the flag of that number) of every weight that is split."""
    tp_flag, etp_flag = "--tensor-model-parallel-size", "--expert-tensor-parallel-size"
    if a.multi_latent_attention:
        heads = a.num_attention_heads
        yield "queries", heads * (a.qk_head_dim + a.qk_pos_emb_head_dim), tp, tp_flag
        yield "keys and values", heads * (a.qk_head_dim + a.v_head_dim), tp, tp_flag
        yield "attention output", heads * a.v_head_dim, tp, tp_flag
    elif a.num_attention_heads and head_dim(a):
        heads, groups = a.num_attention_heads, max(kv_groups(a) or 1, tp)
        yield "queries, keys and values", (heads + 2 * groups) * head_dim(a), tp, tp_flag
        yield "attention output", heads * head_dim(a), tp, tp_flag
    if a.ffn_hidden_size and not _only_experts(a):
        yield "--ffn-hidden-size", a.ffn_hidden_size, tp, tp_flag
    if a.moe_shared_expert_intermediate_size:
        yield "--moe-shared-expert-intermediate-size", a.moe_shared_expert_intermediate_size, tp, tp_flag
    if a.num_experts and a.moe_ffn_hidden_size:
        yield "--moe-ffn-hidden-size", a.moe_ffn_hidden_size, etp, etp_flag


def _only_experts(a: Namespace) -> bool:
    return bool(a.num_experts) and str(a.moe_layer_freq) == "1"


def _finer_recipe(width: int) -> str:
    finer = [recipe for recipe in ("mxfp8", "tensorwise") if math.gcd(width, BLOCKS[recipe]) == BLOCKS[recipe]]
    return f"--fp8-recipe {finer[0]}" if finer else ""


CHECKS = (check_precision, check_fp8, check_fp8_blocks)
