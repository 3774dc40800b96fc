"""Rules of activations: which are recomputed in the backward pass, and which wait on the CPU."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.checks.common import of_trainer
from slime.utils.arguments.flag import Problem

RECOMPUTABLE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
OFFLOADABLE = (
    "core_attn",
    "attn_proj",
    "expert_fc1",
    "fused_group_mlp",
    "moe_act",
    "attn_norm",
    "mlp_norm",
    "qkv_linear",
)
GRANULARITY, METHOD, LAYERS = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"


@of_trainer
def check_recompute(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Full recomputation has a method and a number of layers, selective has modules."""
    kind = a.recompute_granularity
    if a.recompute_activations and kind == "full":
        yield Problem(("--recompute-activations", GRANULARITY), "the one means selective; give one of the two")
        return
    if a.recompute_activations:
        kind = "selective"
    if kind == "full":
        yield from _check_full(a)
    elif kind == "selective":
        for flag, value in ((METHOD, a.recompute_method), (LAYERS, a.recompute_num_layers)):
            if value is not None:
                says = f"{value} goes with full recomputation; selective chooses modules (--recompute-modules)"
                yield Problem((flag,), says, f"{GRANULARITY} full {METHOD} uniform {LAYERS} 1")
        yield from _check_modules(a)
    else:
        for dest in ("recompute_method", "recompute_num_layers", "recompute_modules"):
            if dest in given and getattr(a, dest) is not None:
                legal = "selective" if dest == "recompute_modules" else f"full {METHOD} uniform {LAYERS} 1"
                yield Problem(
                    (given[dest],), f"{GRANULARITY} is not given, so nothing is recomputed", f"{GRANULARITY} {legal}"
                )
    if a.distribute_saved_activations:
        yield from _check_distributed(a, kind)


def _check_full(a: Namespace) -> Iterator[Problem]:
    if a.recompute_method is None:
        says = "is not given, and full recomputation needs it: uniform (all layers) or block (some of them)"
        yield Problem((METHOD,), says, f"{METHOD} uniform")
    most = (a.num_layers or 1) // max(1, a.pipeline_model_parallel_size) or 1
    if a.recompute_num_layers is None:
        says = f"is not given, and full recomputation needs it: 1..{most} layers"
        yield Problem((LAYERS,), says, f"{LAYERS} 1")
    elif a.recompute_num_layers < 1:
        yield Problem((LAYERS,), f"is {a.recompute_num_layers}, must be within 1..{most}", f"{LAYERS} 1")
    if a.moe_layer_recompute:
        says = "full recomputation includes the layers of experts; leave it out"
        yield Problem(("--moe-layer-recompute",), says)


def _check_modules(a: Namespace) -> Iterator[Problem]:
    """What each module needs to be recomputed."""
    modules, flag = a.recompute_modules or (), "--recompute-modules"
    for module in modules:
        if module not in RECOMPUTABLE:
            says = f"{module} is unknown; known: {', '.join(RECOMPUTABLE)}"
            yield Problem((flag,), says, f"{flag} core_attn")
    needs = {
        "moe_act": (a.moe_grouped_gemm, "the experts' grouped product"),
        "mla_up_proj": (a.multi_latent_attention, "latent attention"),
        "gdn_norm_out": (a.experimental_attention_variant == "gated_delta_net", "a gated delta net"),
    }
    for module, (there, what) in needs.items():
        if module in modules and not there:
            legal = " ".join(other for other in modules if other != module) or "core_attn"
            says = f"{module} is part of {what}, which this model does not use"
            yield Problem((flag,), says, f"{flag} {legal}")
    if "shared_experts" in modules and a.moe_shared_expert_overlap and a.moe_shared_expert_intermediate_size:
        says = "shared experts that overlap with communication cannot be recomputed; leave one of the two out"
        yield Problem((flag, "--moe-shared-expert-overlap"), says)
    if a.fp8 and a.fp8_recipe == "delayed" and {"moe_act", "layernorm"} & set(modules):
        says = "moe_act and layernorm are not recomputed under delayed scaling"
        yield Problem((flag, "--fp8-recipe"), says, "--fp8-recipe blockwise")


def _check_distributed(a: Namespace, kind: str | None) -> Iterator[Problem]:
    flag = "--distribute-saved-activations"
    if a.tensor_model_parallel_size == 1:
        yield Problem((flag,), "spreads activations over tensor-parallel ranks, of which there is one; leave it out")
    elif a.sequence_parallel:
        yield Problem(
            (flag, "--sequence-parallel"), "sequence parallelism has spread them already; leave the first out"
        )
    if kind != "full":
        says = "goes with full recomputation"
        yield Problem((flag,), says, f"{GRANULARITY} full {METHOD} uniform {LAYERS} 1")


@of_trainer
def check_activation_offload(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Activations that wait on the CPU: whole layers, or chosen modules."""
    layers, flag = a.cpu_offloading_num_layers, "--cpu-offloading-num-layers"
    if layers < 0 or (a.num_layers and layers >= a.num_layers):
        most = max(0, (a.num_layers or 1) - 1)
        says = f"is {layers}, must be within 0..{most} (--num-layers - 1)"
        yield Problem((flag,), says, f"{flag} {min(max(layers, 0), most)}")
    if layers > 0 and a.pipeline_model_parallel_size > 1:
        says = f"{layers} does not go with --pipeline-model-parallel-size {a.pipeline_model_parallel_size}"
        yield Problem((flag,), says, f"{flag} 0")
    if layers > 0 and (a.recompute_granularity or a.recompute_activations):
        yield Problem((flag, GRANULARITY), "activations are either recomputed or kept on the CPU", f"{flag} 0")
    if a.fine_grained_activation_offloading:
        yield from _check_fine_grained(a, layers)
    elif "offload_modules" in given:
        says = "chooses what --fine-grained-activation-offloading moves, which is not given"
        yield Problem(("--offload-modules",), says, "--fine-grained-activation-offloading")


def _check_fine_grained(a: Namespace, layers: int) -> Iterator[Problem]:
    modules, flag = a.offload_modules or [], "--offload-modules"
    if layers > 0:
        flags = ("--fine-grained-activation-offloading", "--cpu-offloading-num-layers")
        yield Problem(flags, "whole layers or chosen modules: give one of the two", "--cpu-offloading-num-layers 0")
    if a.transformer_impl != "transformer_engine":
        says = f"is not part of --transformer-impl {a.transformer_impl}"
        yield Problem(("--fine-grained-activation-offloading",), says, "--transformer-impl transformer_engine")
    if not modules:
        yield Problem((flag,), "is not given; it says what is moved", f"{flag} core_attn")
    for module in modules:
        if module not in OFFLOADABLE:
            yield Problem((flag,), f"{module} is unknown; known: {', '.join(OFFLOADABLE)}", f"{flag} core_attn")
    if "attn_proj" in modules and "core_attn" not in modules:
        says = "attn_proj's input is core_attn's output, which stays on the GPU for core_attn"
        yield Problem((flag,), says, f"{flag} core_attn attn_proj")
    inside = [module for module in ("moe_act", "expert_fc1", "fused_group_mlp") if module in modules]
    if inside and a.recompute_granularity == "selective" and "moe" in (a.recompute_modules or ()):
        says = f"{', '.join(inside)} would be recomputed with the whole expert layer"
        yield Problem((flag, "--recompute-modules"), says, "--recompute-modules core_attn")


CHECKS = (check_recompute, check_activation_offload)
