"""Rules of mixtures of experts: how they spread, how tokens reach them, and that the router is the checkpoint's."""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from slime.utils.arguments.checks.common import first_of, model_config, of_trainer
from slime.utils.arguments.flag import Problem
from slime.utils.layout.divisors import largest_divisor

EXPERT_FLAGS = (
    "moe_ffn_hidden_size",
    "moe_grouped_gemm",
    "moe_router_enable_expert_bias",
    "moe_latent_size",
)
BALANCING_WITH_CAPACITY = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}


@of_trainer
def check_experts(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Experts split evenly over expert-parallel ranks; without experts nothing asks for them."""
    ep, experts, flag = a.expert_model_parallel_size, a.num_experts, "--expert-model-parallel-size"
    if not experts:
        if ep > 1:
            says = f"{ep} spreads experts, and the model has none (--num-experts is not given)"
            yield Problem((flag,), says, f"{flag} 1")
        for dest in EXPERT_FLAGS:
            if dest in given and getattr(a, dest):
                yield Problem((given[dest],), "describes experts, and --num-experts is not given; leave it out")
        return
    if ep >= 1 and experts % ep:
        says = f"{ep} does not divide the {experts} experts (--num-experts)"
        yield Problem((flag,), says, f"{flag} {largest_divisor(experts, ep)}")
    if a.add_bias_linear and (a.expert_tensor_parallel_size or a.tensor_model_parallel_size) > 1:
        etp = a.expert_tensor_parallel_size or a.tensor_model_parallel_size
        says = f"{etp}: experts with biases cannot be split; the model's have none if it says --disable-bias-linear"
        yield Problem(("--expert-tensor-parallel-size",), says, "--expert-tensor-parallel-size 1")


@of_trainer
def check_router(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The router picks as many experts as there are to pick from, by a function that has a gradient."""
    experts, topk = a.num_experts, a.moe_router_topk
    if not experts:
        return
    if topk > experts:
        says = f"{topk} is more than the {experts} experts (--num-experts)"
        yield Problem(("--moe-router-topk",), says, f"--moe-router-topk {experts}")
    softmax = a.moe_router_score_function == "softmax"
    if topk == 1 and softmax and not a.moe_router_pre_softmax and "sinkhorn" not in _balancing(a):
        says = "1 with softmax after the choice: softmax over one score is 1 whatever the score, so nothing is learned"
        yield Problem(("--moe-router-topk",), says, "--moe-router-pre-softmax")
    if a.moe_router_enable_expert_bias and softmax:
        says = "softmax takes no expert bias (--moe-router-enable-expert-bias); sigmoid and sqrtsoftplus do"
        yield Problem(("--moe-router-score-function",), says, "--moe-router-score-function sigmoid")
    if a.moe_router_enable_expert_bias and a.moe_router_bias_update_rate:
        says = (
            f"{a.moe_router_bias_update_rate:g} would move the expert bias at every step, outside of any gradient, "
            "and so the policy; reinforcement learning keeps it as the checkpoint has it"
        )
        yield Problem(("--moe-router-bias-update-rate",), says, "--moe-router-bias-update-rate 0")
    yield from _check_groups(a, experts, topk)
    yield from _check_balancing(a)


def _check_groups(a: Namespace, experts: int, topk: int) -> Iterator[Problem]:
    """Group-limited routing: equal groups, and enough experts in the chosen ones."""
    chosen, groups = a.moe_router_group_topk, a.moe_router_num_groups
    if not chosen:
        return
    if not groups:
        says = f"{chosen} groups are chosen, and --moe-router-num-groups does not say from how many"
        yield Problem(("--moe-router-group-topk",), says, f"--moe-router-num-groups {chosen}")
        return
    if experts % groups:
        says = f"{groups} does not divide the {experts} experts (--num-experts)"
        legal = f"--moe-router-num-groups {largest_divisor(experts, groups)}"
        yield Problem(("--moe-router-num-groups",), says, legal)
    elif chosen > groups:
        says = f"{chosen} is more than --moe-router-num-groups {groups}"
        yield Problem(("--moe-router-group-topk",), says, f"--moe-router-group-topk {groups}")
    elif topk < chosen:
        says = f"{topk} // --moe-router-group-topk {chosen} = 0: groups are ranked by that many of their experts"
        yield Problem(("--moe-router-topk",), says, f"--moe-router-topk {chosen}")
    elif chosen * (experts // groups) < topk:
        each = experts // groups
        says = f"{topk} is more than --moe-router-group-topk {chosen} x {each} experts a group = {chosen * each}"
        yield Problem(("--moe-router-topk",), says, f"--moe-router-topk {chosen * each}")


def _check_balancing(a: Namespace) -> Iterator[Problem]:
    kinds = _balancing(a)
    weights = a.moe_aux_loss_coeff if isinstance(a.moe_aux_loss_coeff, list) else [a.moe_aux_loss_coeff]
    if len(kinds) > 1 and len(weights) != len(kinds):
        says = f"{len(weights)} weights for the {len(kinds)} losses of --moe-router-load-balancing-type"
        yield Problem(("--moe-aux-loss-coeff",), says, "--moe-aux-loss-coeff " + " ".join(["0"] * len(kinds)))
    if a.moe_expert_capacity_factor is not None and not set(kinds) <= BALANCING_WITH_CAPACITY:
        says = f"{' '.join(kinds)} does not go with --moe-expert-capacity-factor {a.moe_expert_capacity_factor:g}"
        yield Problem(("--moe-router-load-balancing-type",), says, "--moe-router-load-balancing-type none")
    if a.moe_pad_expert_input_to_capacity and a.moe_expert_capacity_factor is None:
        says = "pads to a capacity, and --moe-expert-capacity-factor is not given"
        yield Problem(("--moe-pad-expert-input-to-capacity",), says, "--moe-expert-capacity-factor 1.0")


@of_trainer
def check_dispatcher(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The way tokens travel to their experts suits what is asked of it."""
    kind, flag = a.moe_token_dispatcher_type, "--moe-token-dispatcher-type"
    backend = "deepep" if a.moe_enable_deepep else a.moe_flex_dispatcher_backend
    if a.moe_enable_deepep and kind != "flex":
        yield Problem(
            ("--moe-enable-deepep", flag), f"DeepEP is part of the flex dispatcher, not of {kind}", f"{flag} flex"
        )
    if a.moe_enable_deepep and a.moe_flex_dispatcher_backend not in ("deepep", None):
        says = f"the one asks for deepep, the other for {a.moe_flex_dispatcher_backend}; give one of the two"
        yield Problem(("--moe-enable-deepep", "--moe-flex-dispatcher-backend"), says)
    if not a.moe_enable_deepep and backend == "ncclep" and kind != "flex":
        says = f"ncclep is part of the flex dispatcher, not of {kind}"
        yield Problem(("--moe-flex-dispatcher-backend", flag), says, f"{flag} flex")
    if kind == "flex" and a.num_experts and a.accelerator == "cpu":
        says = "flex moves tokens between GPUs, and this run is on a CPU (--accelerator cpu)"
        yield Problem((flag,), says, f"{flag} alltoall")
    if kind == "flex" and backend == "deepep" and a.moe_pad_expert_input_to_capacity:
        says = "DeepEP does not pad the experts' input; leave one of the two out"
        yield Problem((flag, "--moe-pad-expert-input-to-capacity"), says)
    if a.moe_single_grouped_weight and not a.moe_grouped_gemm:
        yield Problem(("--moe-single-grouped-weight",), "needs --moe-grouped-gemm", "--moe-grouped-gemm")
    if a.moe_router_padding_for_quantization and not (a.fp8 or a.fp4):
        says = "pads for FP8, which is off; leave it out"
        yield Problem(("--moe-router-padding-for-quantization",), says)


@of_trainer
def check_router_of_checkpoint(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The trainer routes as the engines do, which read config.json."""
    config = model_config(a)
    if not a.num_experts or not config:
        return
    for keys, flag, value in (
        (("num_experts_per_tok", "moe_topk"), "--moe-router-topk", a.moe_router_topk),
        (("n_group",), "--moe-router-num-groups", a.moe_router_num_groups or 1),
        (("topk_group",), "--moe-router-group-topk", a.moe_router_group_topk or 1),
        (("scoring_func",), "--moe-router-score-function", a.moe_router_score_function),
        (("routed_scaling_factor",), "--moe-router-topk-scaling-factor", a.moe_router_topk_scaling_factor or 1.0),
    ):
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is not None and not _equal(config[key], value):
            says = f"is {_plain(value)}, and {key} in config.json is {_plain(config[key])}"
            yield Problem((flag,), says, f"{flag} {_plain(config[key])}")
    yield from _check_normalisation(a, config)
    biased = config.get("topk_method") == "noaux_tc" or bool(config.get("use_routing_bias"))
    if biased and not a.moe_router_enable_expert_bias:
        key = "topk_method noaux_tc" if config.get("topk_method") else "use_routing_bias true"
        says = f"is not given, and config.json has {key}: the checkpoint's experts are chosen with a bias"
        yield Problem(("--moe-router-enable-expert-bias",), says, "--moe-router-enable-expert-bias")


def _check_normalisation(a: Namespace, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether the weights of the chosen experts sum to 1: always with sigmoid; with softmax unless it comes first."""
    normalised = config.get("norm_topk_prob")
    if normalised is None or a.moe_router_topk == 1:
        return
    flag = "--moe-router-pre-softmax"
    if a.moe_router_score_function == "softmax":
        if normalised == bool(a.moe_router_pre_softmax):
            means = "softmax over the chosen" if normalised else "softmax over all"
            says = f"config.json has norm_topk_prob {str(normalised).lower()} ({means} experts), the command line "
            says += "has the flag" if a.moe_router_pre_softmax else "lacks it"
            yield Problem((flag,), says, f"leave {flag} out" if normalised else flag)
    elif not normalised:
        says = f"{a.moe_router_score_function} gives weights that sum to 1, and norm_topk_prob in config.json is false"
        yield Problem(("--moe-router-score-function",), says)


@of_trainer
def check_expert_sizes_of_checkpoint(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """As many experts, of the same width, in the same layers, as the checkpoint has."""
    config = model_config(a)
    experts = first_of(config, "n_routed_experts", "num_experts", "num_local_experts")
    if not config or experts is None:
        return
    if (a.num_experts or 0) != experts and "num_experts" in given:
        says = f"is {a.num_experts}, and config.json has {experts} experts"
        yield Problem(("--num-experts",), says, f"--num-experts {experts}")
    shared, width = config.get("n_shared_experts"), config.get("moe_intermediate_size")
    mine = a.moe_shared_expert_intermediate_size
    if shared and width and mine is not None and mine != shared * width:
        made = f"{shared} shared experts x moe_intermediate_size {width} = {shared * width}"
        says = f"is {mine}, and config.json has {made}"
        flag = "--moe-shared-expert-intermediate-size"
        yield Problem((flag,), says, f"{flag} {shared * width}")


def _balancing(a: Namespace) -> list[str]:
    kinds = a.moe_router_load_balancing_type
    return list(kinds) if isinstance(kinds, list | tuple) else [kinds]


def _equal(fact: Any, value: Any) -> bool:
    if isinstance(fact, int | float) and isinstance(value, int | float):
        return math.isclose(fact, value, rel_tol=1e-9)
    return fact == value


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


CHECKS = (
    check_experts,
    check_router,
    check_dispatcher,
    check_router_of_checkpoint,
    check_expert_sizes_of_checkpoint,
)
