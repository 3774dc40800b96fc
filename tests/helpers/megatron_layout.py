"""Megatron's own answer to a pipeline layout: parse, validate, build the configuration, ask every rank."""

import argparse
import contextlib
import functools
import io
from argparse import Namespace
from collections.abc import Iterator, Sequence

MINIMAL = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 64 --position-embedding-type rope "
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-rope-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm"
).split()
REFUSALS = (AssertionError, ValueError, RuntimeError, ZeroDivisionError, NotImplementedError)


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Megatron's parser; the first call imports Megatron."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def parse(argv: Sequence[str]) -> Namespace:
    """Megatron's arguments before validation: what a driver knows of them."""
    args = parser().parse_args([*MINIMAL, *argv])
    args.rank, args.world_size = 1, args.pipeline_model_parallel_size
    args.padded_vocab_size = 64
    args._is_global_batch_size_explicitly_specified = False
    return args


def chunks_of_megatron(argv: Sequence[str]) -> list[tuple[int, int, list[int], int]] | str:
    """(pp_rank, vp_stage, 0-based layers, MTP layers) of every chunk in forward order, or why Megatron refuses."""
    from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    try:
        config = _config(argv)
        pp, vp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
        chunks = []
        for vp_stage in range(vp or 1):
            for pp_rank in range(pp):
                stage = vp_stage if vp else None
                with _as_rank(pp_rank, pp, vp):
                    count = get_num_layers_to_build(config, stage, pp_rank)
                    offset = get_transformer_layer_offset(config, stage, pp_rank)
                    mtp = get_mtp_num_layers_to_build(config, stage)
                if count < 0:
                    return f"rank {pp_rank} would hold {count} layers"
                chunks.append((pp_rank, vp_stage, list(range(offset, offset + count)), mtp))
        return chunks
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"


def _config(argv: Sequence[str]):
    from megatron.training.arguments import core_transformer_config_from_args, validate_args

    with contextlib.redirect_stdout(io.StringIO()):
        args = parse(argv)
        validate_args(args)
        return core_transformer_config_from_args(args)


@contextlib.contextmanager
def _as_rank(pp_rank: int, pp: int, vp: int | None) -> Iterator[None]:
    from megatron.core import parallel_state

    def set_all(rank: int | None, size: int | None, virtual: int | None) -> None:
        parallel_state.set_pipeline_model_parallel_rank(rank)
        parallel_state.set_pipeline_model_parallel_world_size(size)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)

    set_all(pp_rank, pp, vp)
    try:
        yield
    finally:
        set_all(None, None, None)
