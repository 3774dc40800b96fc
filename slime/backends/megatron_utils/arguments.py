"""The namespace the trainer runs with: Megatron's real parser and validation, together with slime's values.

The driver knows Megatron's flags only as a table; here they are parsed again by Megatron itself, in the trainer
process.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any, NoReturn

from slime.backends.megatron_utils import dsa_kernels

logger = logging.getLogger(__name__)

_SIMPLE = (bool, int, float, str)

# Megatron dest -> (value that needs no compiled extension, extensions one of which must be importable for the other
# value).
_FUSIONS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "gradient_accumulation_fusion": (False, ("transformer_engine", "fused_weight_gradient_mlp_cuda")),
    "apply_rope_fusion": (False, ("transformer_engine",)),
    "masked_softmax_fusion": (False, ("transformer_engine", "scaled_masked_softmax_cuda")),
    "no_persist_layer_norm": (True, ("transformer_engine", "apex")),
    "bias_swiglu_fusion": (False, ()),
    "bias_gelu_fusion": (False, ()),
    "bias_dropout_fusion": (False, ()),
    "moe_permute_fusion": (False, ("transformer_engine",)),
    "moe_router_fusion": (False, ("transformer_engine",)),
    "moe_shared_expert_overlap": (False, ()),
    "tp_comm_overlap": (False, ("transformer_engine",)),
    "cross_entropy_loss_fusion": (False, ()),
}


def build_megatron_args(args: Namespace, rank: int, world_size: int) -> Namespace:
    """One namespace with every Megatron attribute, validated by Megatron, and every slime attribute.

    `args.megatron_argv` is parsed by Megatron's parser. Where the driver's namespace holds the same name with a
    plain value it wins: that is how slime's own defaults, derived values and configuration files reach Megatron. The
    result is a plain, mutable namespace, because Megatron keeps run state in it; `result.megatron_names` lists the
    names that are Megatron's.

    Raises ValueError when Megatron's parser or its validation refuses the configuration.
    """
    megatron = _parse(list(args.megatron_argv))
    names = tuple(sorted(vars(megatron)))
    _take_driver_values(megatron, args)
    _fill_defaults(megatron, args, rank, world_size)
    _switch_off_fusions(megatron, args.accelerator)
    _validate(megatron)
    megatron.variable_seq_lengths = True

    merged = {**vars(args), **vars(megatron)}
    # Megatron would use these for its own training loop; here they are slime's (its loop counts rollouts).
    for name in ("eval_interval", "save_interval", "global_batch_size"):
        merged[name] = getattr(args, name)
    return Namespace(**merged, megatron_names=names)


def megatron_only(args: Namespace) -> Namespace:
    """The Megatron part of the trainer's namespace: what a checkpoint may store without needing slime to be read."""
    kept = set(args.megatron_names) | {"data_parallel_size", "params_dtype", "padded_vocab_size", "use_dist_ckpt"}
    return Namespace(**{name: value for name, value in vars(args).items() if name in kept})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Megatron's parser refuses its part of the command line: {message}")


def _parse(argv: list[str]) -> Namespace:
    from megatron.training.arguments import add_megatron_arguments

    parsed = add_megatron_arguments(_Parser(prog="megatron", allow_abbrev=False)).parse_args(argv)
    if parsed.yaml_cfg is not None:
        raise ValueError("--yaml-cfg replaces every flag and is not supported; pass the flags themselves")
    if parsed.async_save:
        raise ValueError("--async-save is not supported yet; leave it out, checkpoints are then saved synchronously")
    parsed._is_global_batch_size_explicitly_specified = parsed.global_batch_size is not None
    return parsed


def _take_driver_values(megatron: Namespace, args: Namespace) -> None:
    """Copy plain values from the driver's namespace; what Megatron's parser made richer types of stays Megatron's."""
    for name, mine in vars(megatron).items():
        if not hasattr(args, name) or name.startswith("_"):
            continue
        theirs = getattr(args, name)
        if mine is None and (theirs is None or isinstance(theirs, _SIMPLE)):
            setattr(megatron, name, theirs)
        elif isinstance(mine, _SIMPLE) and (theirs is None or _same_kind(mine, theirs)):
            setattr(megatron, name, theirs)


def _same_kind(mine: Any, theirs: Any) -> bool:
    number = (int, float)
    if isinstance(mine, bool) or isinstance(theirs, bool):
        return isinstance(mine, bool) and isinstance(theirs, bool)
    return isinstance(theirs, type(mine)) or (isinstance(mine, number) and isinstance(theirs, number))


def _fill_defaults(megatron: Namespace, args: Namespace, rank: int, world_size: int) -> None:
    """Values slime forces on Megatron, and those it derives because the trainer never reads a dataset."""
    megatron.rank, megatron.world_size = rank, world_size
    megatron.distributed_backend = {"cuda": "nccl", "cpu": "gloo"}[args.accelerator]
    megatron.use_distributed_optimizer = True
    megatron.use_gloo_process_groups = True
    megatron.ckpt_format = "torch_dist"
    megatron.ckpt_fully_parallel_load = True
    megatron.dist_ckpt_optim_fully_reshardable = True
    megatron.attention_dropout = megatron.hidden_dropout = 0.0
    megatron.mtp_detach_heads = True
    if args.allgather_cp or megatron.experimental_attention_variant == "dsa":
        megatron.cp_comm_type = ["all_gather"]

    # A shape hint only: micro-batches are packed and of variable length. It must fit the positions and divide by CP.
    hint = min(megatron.seq_length or 4096, megatron.max_position_embeddings or 4096)
    unit = 2 * megatron.context_parallel_size
    megatron.seq_length = max(hint // unit, 1) * unit
    if megatron.max_position_embeddings is None:
        megatron.max_position_embeddings = megatron.seq_length
    if megatron.multi_latent_attention:
        _fill_latent_attention(megatron)
    if megatron.experimental_attention_variant == "dsa":
        asked = any(token.split("=")[0] == dsa_kernels.FLAG for token in args.megatron_argv)
        megatron.dsa_kernel_backend = dsa_kernels.choose_kernels(megatron, args.accelerator, asked)
    if megatron.tokenizer_model is None:
        megatron.tokenizer_type, megatron.tokenizer_model = "HuggingFaceTokenizer", args.hf_checkpoint

    if megatron.vocab_size is None:
        megatron.vocab_size = _vocab_size_of(args.hf_checkpoint)
    if megatron.padded_vocab_size is None:
        unit = megatron.make_vocab_size_divisible_by * megatron.tensor_model_parallel_size
        megatron.padded_vocab_size = -(-megatron.vocab_size // unit) * unit
    elif megatron.padded_vocab_size < megatron.vocab_size:
        raise ValueError(
            f"--padded-vocab-size {megatron.padded_vocab_size} is below the vocabulary of {megatron.vocab_size}"
        )

    samples = (args.num_rollout or 0) * args.rollout_batch_size * args.n_samples_per_prompt
    megatron.train_iters = samples // args.global_batch_size or None
    # Micro-batches come from slime's schedule; Megatron's own batch arithmetic only has to be consistent.
    model_size = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    data_parallel = max(1, world_size // (model_size * megatron.context_parallel_size))
    megatron.eval_global_batch_size = megatron.micro_batch_size * data_parallel
    megatron.eval_micro_batch_size = megatron.micro_batch_size
    if megatron.save is not None and megatron.save_interval is None:
        megatron.save_interval = 1
    if megatron.moe_token_dispatcher_type == "allgather":
        megatron.moe_token_dispatcher_type = "alltoall"  # the all-gather dispatcher cannot take variable lengths


def _fill_latent_attention(megatron: Namespace) -> None:
    """Latent attention has YaRN settings of its own, for which Megatron has no flags: the `--yarn-...` ones serve."""
    if getattr(megatron, "rope_type", None) is None:
        megatron.rope_type = "yarn"
    for name in ("beta_fast", "beta_slow", "original_max_position_embeddings"):
        value = getattr(megatron, f"yarn_{name}")
        if value is not None:
            setattr(megatron, name, value)
    # The indexer's Hadamard rotation of queries and keys changes no score; it needs bfloat16 and an extension.
    megatron.dsa_indexer_rotate_activation = False


def _vocab_size_of(hf_checkpoint: str | None) -> int:
    if hf_checkpoint is None:
        raise ValueError("the vocabulary size is unknown: pass --vocab-size or --hf-checkpoint")
    config = json.loads((Path(hf_checkpoint) / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def _switch_off_fusions(megatron: Namespace, accelerator: str) -> None:
    """Replace fused kernels without their extension (all of them on the CPU) by the plain path, with one log line."""
    changed = []
    for name, (plain, extensions) in _FUSIONS.items():
        available = accelerator != "cpu" and (not extensions or any(map(_importable, extensions)))
        if not available and getattr(megatron, name, plain) != plain:
            setattr(megatron, name, plain)
            changed.append(name)
    if changed:
        logger.info("fused kernels are not available here, using plain ones for: %s", ", ".join(changed))


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _validate(megatron: Namespace) -> None:
    """Megatron's own validation; what it prints (a page of arguments) goes to the debug log."""
    from megatron.training.arguments import validate_args

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            validate_args(megatron)
    except AssertionError as error:
        raise ValueError(f"Megatron refuses this configuration: {error}") from error
    finally:
        logger.debug("Megatron's validation printed:\n%s", printed.getvalue())
