"""In the ranks of bridge tests: models of slime's own provider, filled by a bridge, compared and exported."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTHS = (20, 28, 16)  # a packed row of 64 tokens
TOKENS = sum(LENGTHS)


@contextlib.contextmanager
def built(
    rank: int, world_size: int, name: str, path: str | Path, flags: tuple[str, ...] = (), **facts: Any
) -> Iterator[tuple[Any, list]]:
    """(Megatron's namespace, model chunks) of the tiny model `name` in the layout of `flags`, weights random.

    facts: further attributes of the driver's namespace. Megatron's groups end with the block.
    """
    models = built_in_turn(rank, world_size, {name: path}, flags, **facts)
    with contextlib.closing(models):
        _, args, chunks = next(models)
        yield args, chunks


def built_in_turn(
    rank: int, world_size: int, models: dict[str, Path], flags: tuple[str, ...] = (), **facts: Any
) -> Iterator[tuple[str, Any, list]]:
    """(name, namespace, model chunks) of each model in one layout, whose groups are made once for all."""
    from slime.utils.accelerator import get_accelerator

    get_accelerator("cpu").prepare_trainer()
    from slime.backends.megatron_utils import torch_te

    torch_te.install()
    from megatron.training import global_vars

    from slime.backends.megatron_utils.arguments import build_megatron_args
    from slime.backends.megatron_utils.initialize import initialize_megatron, shutdown_megatron
    from tests.helpers.trainer import trainer_args

    initialized = False
    try:
        for name, path in models.items():
            args = build_megatron_args(trainer_args(name, path, *flags, **facts), rank, world_size)
            if not initialized:
                initialize_megatron(args)
                initialized = True
            global_vars.set_args(args)
            yield name, args, chunks_of(args)
    finally:
        if initialized:
            shutdown_megatron()


def chunks_of(args: Any) -> list:
    """This rank's model chunks, of slime's own provider."""
    from megatron.core import mpu

    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    provider = get_model_provider_func(args)
    virtual = args.virtual_pipeline_model_parallel_size
    return [
        provider(
            mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        )
        for stage in (range(virtual) if virtual else (None,))
    ]


def load(args: Any, chunks: list, path: str | Path) -> None:
    """Fill the chunks, having spoiled them first: what the checkpoint does not reach would be seen."""
    import torch

    from slime.backends.megatron_utils.hf_checkpoint import load_hf_weights

    with torch.no_grad():
        for chunk in chunks:
            for param in chunk.parameters():
                param.fill_(torch.nan)
    load_hf_weights(args, chunks, path)


def exported(args: Any, chunks: list) -> dict[str, Any]:
    """The whole model under Hugging Face names, on every rank, as the weight push sees it."""
    import torch.distributed as dist

    from slime.backends.megatron_utils.update_weight.common import hf_buckets, is_weight_source

    own: list[tuple[str, Any]] = []
    if is_weight_source(with_peers=True):
        for bucket in hf_buckets(args, chunks, 30_000):
            if is_weight_source():
                # 8-bit floats cannot be pickled where Megatron has replaced torch's loader
                own += [(name, t.float() if t.itemsize == 1 else t.detach().clone()) for name, t in bucket]
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    pairs = [pair for part in everywhere for pair in part]
    whole = dict(pairs)
    assert len(whole) == len(pairs), "a tensor came twice"
    return whole


def packed_logits(model: Any, tokens: Any, vocab_size: int) -> Any:
    """[t, vocabulary] of a packed row of LENGTHS, from a model with both pipeline ends, on every TP rank."""
    import torch
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    from tests.helpers.tiny_megatron import packed_params

    positions = torch.arange(TOKENS)[None]
    with torch.no_grad():
        out = model(tokens[None], positions, None, packed_seq_params=packed_params(LENGTHS))
        return gather_from_tensor_model_parallel_region(out)[0, :, :vocab_size]


@functools.cache
def reference_logits(path: str | Path) -> tuple[Any, Any]:
    """(tokens [t], logits [t, vocabulary] of transformers, sequence by sequence)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, model.config.vocab_size, (TOKENS,), generator=generator)
    with torch.no_grad():
        return tokens, torch.cat([model(part[None]).logits[0] for part in tokens.split(list(LENGTHS))])
