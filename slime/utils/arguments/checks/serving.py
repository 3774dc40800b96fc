"""Rules of SGLang's server: batching, memory and speculative decoding, as its own start-up would refuse them."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.checks.common import first_of, model_config, of_engines, round_up
from slime.utils.arguments.flag import Problem

DRAFT_MODEL_NEEDED = ("EAGLE3", "STANDALONE", "DFLASH")
SHARED_DRAFT = ("EAGLE", "NEXTN")  # the draft may be the checkpoint's own layers of multi-token prediction
ALGORITHMS = (*SHARED_DRAFT, *DRAFT_MODEL_NEEDED, "DSPARK", "NGRAM", "FROZEN_KV_MTP")
ALGORITHM, STEPS = "--sglang-speculative-algorithm", "--sglang-speculative-num-steps"
TOPK, DRAFTS = "--sglang-speculative-eagle-topk", "--sglang-speculative-num-draft-tokens"
AT_LEAST_ONE = (
    "sglang_max_running_requests",
    "sglang_max_total_tokens",
    "sglang_max_prefill_tokens",
    "sglang_page_size",
    "sglang_context_length",
    "sglang_pp_max_micro_batch_size",
    "sglang_tokenizer_worker_num",
    "sglang_dcp_size",
)


@of_engines
def check_engine_memory(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Fractions are fractions, and counts count."""
    fraction, flag = a.sglang_mem_fraction_static, "--sglang-mem-fraction-static"
    if fraction is not None and not 0 < fraction < 1:
        says = f"is {fraction:g}, must be within (0, 1): the part of a GPU's memory for weights and KV cache"
        yield Problem((flag,), says, f"{flag} 0.7")
    for dest in AT_LEAST_ONE:
        value = getattr(a, dest)
        if value is not None and value < 1:
            option = given.get(dest, "--" + dest.replace("_", "-"))
            yield Problem((option,), f"is {value}, must be at least 1", f"{option} 1")
    if a.sglang_schedule_conservativeness < 0:
        option = "--sglang-schedule-conservativeness"
        yield Problem((option,), f"is {a.sglang_schedule_conservativeness:g}, must be >= 0", f"{option} 1.0")
    chunk, page = a.sglang_chunked_prefill_size, a.sglang_page_size
    dp = a.sglang_dp_size if a.sglang_enable_dp_attention else 1
    if chunk and chunk > 0 and page and page > 0 and (chunk // max(1, dp)) % page:
        divided = f" / {dp} data-parallel ranks = {chunk // dp}" if dp > 1 else ""
        says = f"{chunk}{divided} is not a multiple of --sglang-page-size {page}"
        legal = round_up(chunk, page * max(1, dp))
        yield Problem(("--sglang-chunked-prefill-size",), says, f"--sglang-chunked-prefill-size {legal}")


@of_engines
def check_engine_options(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Options that exclude or need each other."""
    if a.sglang_disable_cuda_graph_padding and a.sglang_enable_torch_compile:
        flags = ("--sglang-disable-cuda-graph-padding", "--sglang-enable-torch-compile")
        yield Problem(flags, "each batch size would be compiled on its own; leave one of the two out")
    if a.sglang_enable_two_batch_overlap and a.sglang_moe_a2a_backend == "none" and not a.sglang_enable_dp_attention:
        says = "overlaps the exchange of tokens, and there is none without expert or data-parallel attention"
        yield Problem(("--sglang-enable-two-batch-overlap",), says, "--sglang-moe-a2a-backend deepep")
    if a.sglang_moe_a2a_backend == "flashinfer":
        tp = a.rollout_num_gpus_per_engine // max(1, a.sglang_pp_size)
        if not a.sglang_enable_dp_attention or a.sglang_dp_size != tp:
            says = f"flashinfer needs data-parallel attention over all {tp} ranks"
            legal = f"--sglang-enable-dp-attention --sglang-dp-size {tp}"
            yield Problem(("--sglang-moe-a2a-backend",), says, legal)
    if a.sglang_moe_a2a_backend == "none" and a.sglang_ep_dispatch_algorithm in ("static", "lp"):
        says = (
            f"{a.sglang_ep_dispatch_algorithm} picks another copy of an expert on each rank, and without an exchange "
        )
        legal = "--sglang-ep-dispatch-algorithm dynamic"
        yield Problem(("--sglang-ep-dispatch-algorithm",), says + "of tokens all ranks must agree", legal)
    if a.sglang_retraction_policy == "priority" and not a.sglang_enable_priority_scheduling:
        says = "priority needs requests that have one"
        yield Problem(("--sglang-retraction-policy",), says, "--sglang-enable-priority-scheduling")
    if a.sglang_enable_prefill_cp and a.sglang_cp_strategy is None:
        says = "needs --sglang-cp-strategy"
        yield Problem(("--sglang-enable-prefill-cp",), says, "--sglang-cp-strategy zigzag")
    if a.sglang_disaggregation_mode != "null":
        says = f"{a.sglang_disaggregation_mode} for all engines leaves the other half of each request to nobody"
        yield Problem(("--sglang-disaggregation-mode",), says, "give --prefill-num-servers 1 instead")
    if a.accelerator == "cpu" and a.sglang_kv_cache_dtype not in ("auto", "bfloat16", "bf16"):
        says = f"{a.sglang_kv_cache_dtype} needs a GPU, and this run is on a CPU (--accelerator cpu)"
        yield Problem(("--sglang-kv-cache-dtype",), says, "--sglang-kv-cache-dtype auto")


@of_engines
def check_speculative(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A draft model, and how far it runs ahead: all of its numbers or none."""
    name = (a.sglang_speculative_algorithm or "").upper()
    if not name:
        for dest in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"):
            if f"sglang_{dest}" in given:
                says = f"tunes speculative decoding, and {ALGORITHM} is not given"
                yield Problem((given[f"sglang_{dest}"],), says, f"{ALGORITHM} EAGLE")
        return
    if name not in ALGORITHMS:
        says = f"{a.sglang_speculative_algorithm} is unknown; known: {', '.join(ALGORITHMS)}"
        yield Problem((ALGORITHM,), says, f"{ALGORITHM} EAGLE")
        return
    if a.sglang_pp_size > 1:
        says = f"{name} does not go with --sglang-pp-size {a.sglang_pp_size}"
        yield Problem((ALGORITHM, "--sglang-pp-size"), says, "--sglang-pp-size 1")
    if name in ("STANDALONE", "DFLASH", "NGRAM") and a.sglang_enable_dp_attention:
        yield Problem(
            (ALGORITHM, "--sglang-enable-dp-attention"), f"{name} does not go with it; leave one of the two out"
        )
    yield from _check_draft_model(a, name)
    if name not in ("NGRAM", "DFLASH", "DSPARK"):
        yield from _check_draft_numbers(a)


def _check_draft_model(a: Namespace, name: str) -> Iterator[Problem]:
    path, config = a.sglang_speculative_draft_model_path, model_config(a)
    flag = "--sglang-speculative-draft-model-path"
    if name in DRAFT_MODEL_NEEDED and path is None:
        yield Problem(
            (flag,), f"is not given, and {ALGORITHM} {name} drafts with a model of its own", f"{flag} /models/draft"
        )
    layers = first_of(config, "num_nextn_predict_layers", "mtp_num_hidden_layers")
    if name in SHARED_DRAFT and path is None and config and layers == 0:
        says = f"{name} without {flag} drafts with the checkpoint's own layers, and config.json has none "
        yield Problem((ALGORITHM,), says + "(num_nextn_predict_layers 0)", f"{flag} /models/draft")


def _check_draft_numbers(a: Namespace) -> Iterator[Problem]:
    steps, topk = a.sglang_speculative_num_steps, a.sglang_speculative_eagle_topk
    drafts = a.sglang_speculative_num_draft_tokens
    for flag, value in ((STEPS, steps), (TOPK, topk), (DRAFTS, drafts)):
        if value is not None and value < 1:
            yield Problem((flag,), f"is {value}, must be at least 1", f"{flag} 1")
            return
    if steps is None and (topk is not None or drafts is not None):
        other = TOPK if topk is not None else DRAFTS
        says = f"is not given, and {other} is: give all three numbers, or none for SGLang's choice"
        yield Problem((STEPS,), says, f"{STEPS} 3 {TOPK} 1 {DRAFTS} 4")
    elif steps is not None and topk is None:
        says = f"is not given, and {STEPS} is: give all three numbers, or none for SGLang's choice"
        yield Problem((TOPK,), says, f"{TOPK} 1 {DRAFTS} {steps + 1}")
    elif topk is not None and topk > 1 and drafts is None:
        says = f"is not given; of the tree of {TOPK} {topk} over {steps} steps it keeps that many tokens"
        yield Problem((DRAFTS,), says, f"{DRAFTS} {2 * topk}")
    elif topk is not None and topk > 1 and (a.sglang_page_size or 1) > 1 and a.sglang_attention_backend is not None:
        if a.sglang_attention_backend not in ("flashinfer", "fa3", "triton"):
            says = f"{topk} with --sglang-page-size {a.sglang_page_size} works with flashinfer, fa3 and triton only"
            yield Problem((TOPK, "--sglang-attention-backend"), says, f"{TOPK} 1")


CHECKS = (check_engine_memory, check_engine_options, check_speculative)
