"""Megatron models of tiny Hugging Face checkpoints in a gloo rank, their packed batches and their gradients."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

LENGTHS = ((8, 20, 4), (12, 4, 16), (24, 8), (4, 28))  # packed micro-batches of 32 tokens, every length 2 * cp * k
TOKENS = 32


@dataclass(frozen=True)
class Layout:
    """Model-parallel sizes; data parallel is what is left of the world."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int | None = None


def start(layout: Layout) -> None:
    """Prepare this process and Megatron's groups. The gloo group must exist. Can be called again."""
    from slime.utils.accelerator import get_accelerator

    get_accelerator("cpu").prepare_trainer()
    from slime.backends.megatron_utils import torch_te

    torch_te.install()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, layout.vpp, context_parallel_size=layout.cp, create_gloo_process_groups=True
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def make_args(path: Path, layout: Layout, **overrides: Any) -> Namespace:
    """What weight loading, conversion and pushing read from the arguments."""
    import json

    import torch

    config = json.loads((Path(path) / "config.json").read_text())
    heads = config["num_attention_heads"]
    values = {
        "hf_checkpoint": str(path),
        "model_name": None,
        "params_dtype": torch.float32,
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "padded_vocab_size": 256,
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "num_experts": None,
        "expert_model_parallel_size": 1,
        "accelerator": "cpu",
        "colocate": False,
        "update_weight_mode": "full",
        "update_weight_transport": "nccl",
        "update_weight_buffer_size": 40_000,
        "update_weight_disk_keep_files": False,
    }
    return Namespace(**(values | overrides))


def build(path: Path, layout: Layout) -> list:
    """The model chunks of this rank with the checkpoint's sizes and random weights."""
    import json

    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    hf = json.loads((Path(path) / "config.json").read_text())
    args = make_args(path, layout)
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=args.kv_channels,
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf["model_type"] == "qwen2",
        qk_layernorm=hf["model_type"] == "qwen3",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        # two stages are each other's neighbour on both sides: a batch of sends could not be told apart
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
    )

    def chunk(vp_stage: int | None) -> GPTModel:
        virtual = {"ignore_virtual": False, "vp_stage": vp_stage}
        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=mpu.is_pipeline_first_stage(**virtual),
            post_process=mpu.is_pipeline_last_stage(**virtual),
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            position_embedding_type="rope",
            rotary_base=hf["rope_parameters"]["rope_theta"],
            vp_stage=vp_stage,
        )

    return [chunk(stage) for stage in (range(layout.vpp) if layout.vpp else (None,))]


def load(path: Path, layout: Layout) -> tuple[Namespace, list]:
    """(args, model chunks) holding the checkpoint's weights."""
    from slime.backends.megatron_utils.hf_checkpoint import load_hf_weights

    args, chunks = make_args(path, layout), build(path, layout)
    load_hf_weights(args, chunks, path)
    return args, chunks


def packed_params(lengths: Sequence[int]) -> Any:
    """PackedSeqParams of whole sequences with these lengths."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )


def micro_batches(vocab: int) -> list[tuple[Any, Any, tuple[int, ...]]]:
    """(tokens [32], labels [32], lengths), the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(7)
    return [(*torch.randint(0, vocab, (2, TOKENS), generator=generator), lengths) for lengths in LENGTHS]


def zigzag(row: Any, lengths: Sequence[int], cp: int, rank: int) -> Any:
    """This CP rank's chunks r and 2 * cp - 1 - r of every sequence of the row [t]."""
    import torch

    chunks = [sequence.chunk(2 * cp) for sequence in row.split(list(lengths))]
    return torch.cat([c[index] for c in chunks for index in (rank, 2 * cp - 1 - rank)])


def hf_gradients(path: Path, layout: Layout) -> tuple[float, dict[str, Any]]:
    """(mean loss, gradients under Hugging Face names) of the mean over the micro-batches' mean token losses."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    args, chunks = load(path, layout)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(chunk.config, options, chunk) for chunk in chunks]
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    mine = micro_batches(args.vocab_size)[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
    results = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[iter(mine) for _ in wrapped] if layout.vpp else iter(mine),
        model=wrapped,
        num_microbatches=len(mine),
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    loss = sum(float(result["loss"]) for result in results) if results else 0.0
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, loss / layout.tp)
    for chunk in chunks:
        for param in chunk.parameters():
            param.data = param.main_grad
    return sum(everywhere) / len(LENGTHS), exported(args, chunks)


def exported(args: Namespace, chunks: list) -> dict[str, Any]:
    """All parameters of all pipeline stages under Hugging Face names, on every rank."""
    import torch.distributed as dist

    from slime.backends.megatron_utils.update_weight.common import hf_buckets

    own = {name: tensor.clone() for bucket in hf_buckets(args, chunks, 10_000) for name, tensor in bucket}
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return {name: tensor for stage in everywhere for name, tensor in stage.items()}


def _forward(batches: Any, model: Any) -> tuple[Any, Any]:
    import torch
    from megatron.core import parallel_state as mpu

    tokens, labels, lengths = next(batches)
    cp, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if cp > 1:
        tokens, labels = (zigzag(row, lengths, cp, rank) for row in (tokens, labels))
    positions = torch.arange(tokens.numel())[None]
    out = model(tokens[None], positions, None, labels=labels[None], packed_seq_params=packed_params(lengths))
    return out, partial(_mean_loss, TOKENS)


def _mean_loss(count: int, losses: Any) -> tuple[Any, dict[str, Any]]:
    loss = losses.float().sum() / count  # Megatron multiplies by cp and DDP averages over dp x cp
    return loss, {"loss": loss.detach().clone()}
