"""Rules of communication that overlaps with computation, and of what Megatron offers and slime's trainer does not."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.checks.common import is_interleaved, of_trainer
from slime.utils.arguments.flag import Problem

# dest -> why the trainer cannot do it. Megatron's own training loop can.
UNSUPPORTED = {
    "use_megatron_fsdp": "weights are synchronised from Megatron's distributed optimizer only",
    "use_torch_fsdp2": "weights are synchronised from Megatron's distributed optimizer only",
    "hybrid_context_parallel": "each micro-batch is cut for one context-parallel size",
    "hierarchical_context_parallel_sizes": "context parallelism has one level",
    "tensor_parallel_num_weight_shards": "weights are synchronised from whole tensor-parallel shards",
    "expert_tensor_parallel_num_weight_shards": "weights are synchronised from whole tensor-parallel shards",
    "hybrid_layer_pattern": "models of mixed layer kinds come through --spec",
    "heterogeneous_layers_config_path": "all layers of a kind have the same sizes",
    "perform_rl_step": "slime's loop is the reinforcement learning",
    "rampup_batch_size": "every optimizer step has --global-batch-size responses",
    "step_batch_size_schedule": "every optimizer step has --global-batch-size responses",
    "moe_use_upcycling": "a checkpoint is loaded as the model that it holds",
    "use_checkpoint_args": "the model is described by config.json and the command line",
    "freeze_all_layers": "there would be nothing to train; use --freeze-params-name-list",
    "enable_cuda_graph": "packed micro-batches have a new shape each time",
    "external_cuda_graph": "packed micro-batches have a new shape each time",
    "yaml_cfg": "it would replace every flag",
}


@of_trainer
def check_overlap(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Each overlap builds on another."""
    gather, reduce = "--overlap-param-gather", "--overlap-grad-reduce"
    if a.overlap_param_gather and not a.overlap_grad_reduce:
        yield Problem((gather,), "builds on the overlapped reduction of gradients", reduce)
    if a.overlap_param_gather_with_optimizer_step:
        says = "does not go with distributed checkpoints, which slime writes; leave it out"
        yield Problem(("--overlap-param-gather-with-optimizer-step",), says)
    if a.overlap_p2p_comm_warmup_flush and not a.overlap_p2p_comm:
        flags = ("--overlap-p2p-communication-warmup-flush", "--no-overlap-p2p-communication")
        yield Problem(flags, "the one extends what the other switches off; give one of the two")
    if a.defer_embedding_wgrad_compute and a.pipeline_model_parallel_size == 1:
        says = "defers work to the end of a pipeline, and --pipeline-model-parallel-size is 1; leave it out"
        yield Problem(("--defer-embedding-wgrad-compute",), says)
    if a.delay_wgrad_compute and not a.overlap_moe_expert_parallel_comm:
        says = "fills the time of the experts' communication"
        yield Problem(("--delay-wgrad-compute",), says, "--overlap-moe-expert-parallel-comm")
    if a.moe_shared_expert_overlap and a.moe_token_dispatcher_type not in ("alltoall", "flex"):
        says = f"goes with the dispatchers alltoall and flex, not {a.moe_token_dispatcher_type}"
        yield Problem(("--moe-shared-expert-overlap",), says, "--moe-token-dispatcher-type alltoall")


@of_trainer
def check_expert_overlap(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Hiding the experts' communication behind another micro-batch's computation."""
    flag = "--overlap-moe-expert-parallel-comm"
    if not a.overlap_moe_expert_parallel_comm:
        return
    if a.expert_model_parallel_size == 1:
        yield Problem(
            (flag,), "hides communication between expert-parallel ranks, of which there is one; leave it out"
        )
    if a.pipeline_model_parallel_size > 1 and not (is_interleaved(a) or a.pipeline_model_parallel_layout):
        says = f"with --pipeline-model-parallel-size {a.pipeline_model_parallel_size} it needs virtual stages"
        yield Problem((flag,), says, "--num-virtual-stages-per-pipeline-rank 2")
    if a.recompute_granularity == "full" or "moe" in (a.recompute_modules or ()):
        says = "whole layers are recomputed, which cannot be interleaved"
        yield Problem((flag, "--recompute-granularity"), says, "leave --recompute-granularity out")
    if a.moe_shared_expert_overlap:
        yield Problem((flag, "--moe-shared-expert-overlap"), "give one of the two")
    if a.fp32:
        yield Problem((flag, "--fp32"), "goes with 16-bit training", "give --bf16 instead")
    if (a.mtp_num_layers or 0) > 1:
        yield Problem(("--mtp-num-layers", flag), f"{a.mtp_num_layers}: at most 1 layer", "--mtp-num-layers 1")


@of_trainer
def check_megatron_features(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Flags of Megatron that its parser takes and slime's trainer would not honour."""
    for dest, why in UNSUPPORTED.items():
        if dest in given and getattr(a, dest):
            yield Problem((given[dest],), f"is not supported yet by this version of slime: {why}", kind="unsupported")
    if "ckpt_format" in given and a.ckpt_format != "torch_dist":
        says = f"{a.ckpt_format} is not supported yet by this version of slime, which writes torch_dist"
        yield Problem(("--ckpt-format",), says, "--ckpt-format torch_dist", kind="unsupported")
    if "cuda_graph_impl" in given and a.cuda_graph_impl != "none":
        says = f"{a.cuda_graph_impl} is not supported yet by this version of slime: packed micro-batches have a new "
        yield Problem(("--cuda-graph-impl",), says + "shape each time", "--cuda-graph-impl none", kind="unsupported")
    if "transformer_impl" in given and a.transformer_impl != "transformer_engine":
        says = (
            f"{a.transformer_impl} is not supported yet by this version of slime: the layers are named as Transformer "
        )
        legal = "--transformer-impl transformer_engine"
        yield Problem(
            ("--transformer-impl",), says + "Engine's (without it, plain ones of the same names)", legal, "unsupported"
        )
    if a.attention_backend == "local" and "attention_backend" in given:
        says = "local needs Megatron's local layers, and the trainer's are Transformer Engine's"
        yield Problem(("--attention-backend",), says, "--attention-backend auto")


CHECKS = (check_overlap, check_expert_overlap, check_megatron_features)
