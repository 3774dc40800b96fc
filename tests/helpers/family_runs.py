"""What runs in the ranks of model-family tests: one family in one layout against transformers' numbers."""

from functools import partial
from pathlib import Path
from typing import Any

LENGTHS = (72, 4, 20)  # a packed row of 96 tokens; every length splits over two zigzag ranks
TOKENS = sum(LENGTHS)
PADDED_VOCAB = 256
LAYOUTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "tp": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "cp": ("--context-parallel-size", "2"),
    "pp": ("--pipeline-model-parallel-size", "2"),
    "ep": ("--expert-model-parallel-size", "2"),
    "recompute": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
}


def tokens_of(vocab_size: int) -> Any:
    """[t] tokens of the packed row; the labels are the tokens reversed."""
    import torch

    return torch.randint(0, vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(3))


def reference(path: Path) -> dict[str, Any]:
    """transformers' logits [t, vocabulary], sequence by sequence, loss, and gradients under checkpoint names."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokens = tokens_of(model.config.vocab_size)
    logits = torch.cat([model(part[None]).logits[0] for part in tokens.split(list(LENGTHS))])
    # Megatron's loss goes over its padded vocabulary, whose rows beyond the checkpoint's are zeros
    padded = torch.nn.functional.pad(logits, (0, PADDED_VOCAB - logits.size(1)))
    loss = torch.nn.functional.cross_entropy(padded, tokens.flip(0))
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    model.save_pretrained(path / "gradients")
    return {
        "logits": logits.detach(),
        "loss": loss.item(),
        "gradients": load_file(path / "gradients" / "model.safetensors"),
    }


def family_in_layout(rank: int, world_size: int, name: str, path: Path, layout: str) -> dict[str, Any]:
    """Round trip, logits (without pipeline), loss and gradients of the family, as rank 0 sees them.

    "plain" reads the distributed checkpoint that "tp" wrote.
    """
    import torch

    from tests.helpers.bridge_runs import built, exported, load

    with built(rank, world_size, name, path, LAYOUTS[layout]) as (args, chunks):
        from megatron.core import mpu

        load(args, chunks, path)
        found: dict[str, Any] = {"weights": exported(args, chunks)}
        tokens = tokens_of(args.vocab_size)
        if layout in ("plain", "tp"):
            found["logits"] = _logits(args, chunks[0], tokens, LENGTHS)
        if layout == "tp":
            _save(chunks[0], path / "torch_dist")
        if layout == "plain":
            found["unpacked"] = _unpacked_logits(args, chunks[0], tokens)
            found["other neighbours"] = _with_other_neighbours(args, chunks[0], tokens)
            _load(chunks[0], path / "torch_dist")
            found["resharded"] = exported(args, chunks)
        found["loss"], found["gradients"] = _gradients(args, chunks, tokens)
        last = mpu.is_pipeline_last_stage()
    everywhere: list = [None] * world_size
    torch.distributed.all_gather_object(everywhere, found["loss"] if last else None)
    found["loss"] = [loss for loss in everywhere if loss is not None]
    return found if rank == 0 else {}


def with_vision_tower(path: Path, target: Path) -> Path:
    """The checkpoint of a language model with experts at `path` as the published ones are: experts packed by layer,
    names beside a vision tower, a prediction layer, the model's config.json inside another one."""
    import json
    import re

    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    out = {"model.visual.patch_embed.proj.weight": torch.zeros(2, 3), "mtp.fc.weight": torch.zeros(3, 2)}
    experts: dict[str, dict[int, dict[str, Any]]] = {}
    for name, tensor in weights.items():
        name = re.sub(r"^model\.", "model.language_model.", name)
        if match := re.fullmatch(r"(.+\.mlp\.experts\.)(\d+)\.(\w+)_proj\.weight", name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            out[name] = tensor
    for prefix, layer in experts.items():
        ordered = [layer[number] for number in sorted(layer)]
        out[prefix + "gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in ordered])
        out[prefix + "down_proj"] = torch.stack([e["down"] for e in ordered])
    target.mkdir()
    save_file(out, target / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    outer = {"model_type": text["model_type"].removesuffix("_text"), "text_config": text, "vision_config": {}}
    (target / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": text["tie_word_embeddings"]}))
    return target


def with_prediction_layer(path: Path, target: Path) -> Path:
    """The checkpoint at `path` with a multi-token-prediction layer: its last layer negated, and what leads to it."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    last = f"model.layers.{max(int(name.split('.')[2]) for name in weights if '.layers.' in name)}."
    extra = {"mtp.layers.0." + name.removeprefix(last): -t for name, t in weights.items() if name.startswith(last)}
    hidden = weights["model.norm.weight"].size(0)
    generator = torch.Generator().manual_seed(5)
    extra["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        extra[f"mtp.{name}.weight"] = torch.randn(hidden, generator=generator)
    target.mkdir()
    save_file(weights | extra, target / "model.safetensors")
    shutil.copy(path / "config.json", target)
    return target


def families_in_layouts(
    rank: int,
    world_size: int,
    runs: list[tuple[str, Path, str]],
    round_trips: dict[str, tuple[str, Path, tuple[str, ...]]],
    refused: list[tuple[str, Path, tuple[str, ...]]],
) -> dict[Any, Any]:
    """`family_in_layout` of each (name, path, layout) in runs.

    And for each key of round_trips what leaves a model built with (name, path, flags) and filled from path; "refused":
    what is said to each (name, path, flags) in refused, which cannot be built.
    """
    from tests.helpers.bridge_runs import built, exported, load

    found: dict[Any, Any] = {
        (name, layout): family_in_layout(rank, world_size, name, path, layout) for name, path, layout in runs
    }
    for key, (name, path, flags) in round_trips.items():
        with built(rank, world_size, name, path, flags) as (args, chunks):
            load(args, chunks, path)
            found[key] = exported(args, chunks)
    found["refused"] = [_refusal(rank, world_size, *case) for case in refused]
    return found


def _refusal(rank: int, world_size: int, name: str, path: Path, flags: tuple[str, ...]) -> str:
    from tests.helpers.bridge_runs import built

    try:
        with built(rank, world_size, name, path, flags):
            return "built"
    except ValueError as error:
        return str(error)


def _save(chunk: Any, directory: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        directory.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(chunk.sharded_state_dict(), str(directory))


def _load(chunk: Any, directory: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for param in chunk.parameters():
            param.fill_(torch.nan)
    chunk.load_state_dict(dist_checkpointing.load(chunk.sharded_state_dict(), str(directory)))


def _logits(args: Any, model: Any, tokens: Any, lengths: tuple[int, ...]) -> Any:
    import torch
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    from tests.helpers.tiny_megatron import packed_params

    positions = torch.arange(len(tokens))[None]
    with torch.no_grad():
        out = model(tokens[None], positions, None, packed_seq_params=packed_params(lengths))
        return gather_from_tensor_model_parallel_region(out)[0, :, : args.vocab_size]


def _unpacked_logits(args: Any, model: Any, tokens: Any) -> Any:
    """[sequences, t, vocabulary] of a batch: the longest sequence and, as a second row, its tokens reversed."""
    import torch

    rows = torch.stack((tokens[: LENGTHS[0]], tokens[: LENGTHS[0]].flip(0)))
    positions = torch.arange(LENGTHS[0]).expand_as(rows)
    with torch.no_grad():
        return model(rows, positions, None)[..., : args.vocab_size]


def _with_other_neighbours(args: Any, model: Any, tokens: Any) -> Any:
    """Logits of the last sequence of the row when all tokens before it are others."""
    import torch

    others = torch.cat(((tokens[: -LENGTHS[-1]] + 1) % args.vocab_size, tokens[-LENGTHS[-1] :]))
    return _logits(args, model, others, LENGTHS)[-LENGTHS[-1] :]


def _gradients(args: Any, chunks: list, tokens: Any) -> tuple[float, dict[str, Any]]:
    """(this rank's loss, gradients under checkpoint names) of the mean token loss of the packed row."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.helpers.bridge_runs import exported

    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(chunk.config, options, chunk) for chunk in chunks]
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    results = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter([tokens]),
        model=wrapped,
        num_microbatches=1,
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    with torch.no_grad():
        for chunk in chunks:
            for param in chunk.parameters():
                param.copy_(param.main_grad)
    return sum(float(result["loss"]) for result in results), exported(args, chunks)


def _forward(rows: Any, model: Any) -> tuple[Any, Any]:
    import torch
    from megatron.core import mpu

    from tests.helpers.tiny_megatron import packed_params, zigzag

    tokens = next(rows)
    labels = tokens.flip(0)
    cp, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if cp > 1:
        tokens, labels = (zigzag(row, LENGTHS, cp, rank) for row in (tokens, labels))
    positions = torch.arange(len(tokens))[None]
    out = model(tokens[None], positions, None, labels=labels[None], packed_seq_params=packed_params(LENGTHS))
    return out, partial(_mean_loss, len(LENGTHS))


def _mean_loss(_: int, losses: Any) -> tuple[Any, dict[str, Any]]:
    # of the whole row: the schedule multiplies by the context-parallel size, DDP averages over these ranks
    loss = losses.float().sum() / TOKENS
    return loss, {"loss": loss.detach().clone()}
