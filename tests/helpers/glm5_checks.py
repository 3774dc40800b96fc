"""Checks of sparse attention that share four ranks. Each `check_*` takes (rank, {model: directory}, scratch).

The directory of a model holds the checkpoint, and `reference` what tests/helpers/glm5_reference.py says of it.
"""

import logging
import shutil
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers.bridge_runs import built, exported, load
from tests.helpers.glm5_reference import ROWS, TOKENS, rows

WORLD = 4
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
PP2 = ("--pipeline-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EXPERTS = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
LAYOUTS = {
    "packed": (),
    "full recompute": FULL,
    "full recompute, 3 layers at once": (*FULL[:-1], "3"),
    "selective recompute": ("--recompute-granularity", "selective", "--recompute-modules", "core_attn"),
    "pp2": (*PP2, "--decoder-first-pipeline-num-layers", "6"),
    "pp2 vpp2": (*PP2, "--pipeline-model-parallel-layout", "Et|t|tttt|ttL"),
    "cp2": CP2,
    "cp2 full recompute": (*CP2, *FULL),
    "tp2 sp ep2": (*TP2, *EXPERTS),
    "tp2 sp cp2 ep2 recompute": (*TP2, *CP2, *EXPERTS, *FULL),  # as the launch script of GLM-5.2 combines them
    "pp2 cp2": (*PP2, *CP2, "--decoder-first-pipeline-num-layers", "2"),
}
Paths = dict[str, Path]


def run_checks(rank: int, world_size: int, models: Paths, scratch: Path, names: Sequence[str]) -> None:
    """The checks `names`, in order."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    for name in names:
        directory = scratch / name / str(rank)
        directory.mkdir(parents=True)
        globals()[name](rank, models, directory)


def check_names() -> list[str]:
    return [name for name in globals() if name.startswith("check_") and name != "check_names"]


def check_logits_and_gradients_equal_transformers_in_every_layout(rank: int, models: Paths, scratch: Path) -> None:
    """Sequences longer than index_topk: a wrong choice of tokens in any layer, or one of a wrong layer, is seen."""
    for name, layouts in {"glm5_2": tuple(LAYOUTS), "deepseek_v32": ("packed", "cp2")}.items():
        for layout in layouts:
            with built(rank, WORLD, name, models[name], LAYOUTS[layout]) as (args, chunks):
                load(args, chunks, models[name])
                compare_with_reference(args, chunks, models[name], f"{name} {layout}")


def check_the_indexers_loss_and_its_gradients(rank: int, models: Paths, scratch: Path) -> None:
    """KL over the chosen tokens, averaged over all tokens: the metric, and gradients of indexers alone.

    The rest of the model must not notice that indexers are trained.
    """
    import torch
    from safetensors.torch import load_file

    from slime.backends.megatron_utils.indexer_loss import indexer_metrics

    path, coefficient = models["glm5_2"], 0.7
    wanted = torch.load(path / "reference" / "indexers.pt")
    main = load_file(path / "reference" / "gradients" / "model.safetensors")
    trained = ("--dsa-indexer-loss-coeff", str(coefficient), "--dsa-indexer-use-sparse-loss")
    for layout in ("packed", "pp2", "cp2 full recompute", "tp2 sp ep2"):
        with built(rank, WORLD, "glm5_2", path, (*LAYOUTS[layout], *trained)) as (args, chunks):
            load(args, chunks, path)
            _, gradients = logits_and_gradients(args, chunks)
            each = len(ROWS) // args.data_parallel_size
            metric = indexer_metrics(args, each)["indexer_kl"]
            assert abs(metric - wanted["kl"]) < 1e-4 * wanted["kl"], (layout, metric, wanted["kl"])
            for name, tensor in {**main, **wanted["gradients"]}.items():
                factor = coefficient if ".indexer." in name else 1.0
                error, scale = (gradients[name] - factor * tensor).abs().max(), factor * tensor.abs().max()
                assert error <= 1e-4 * scale, (layout, name, float(error), float(scale))


def check_grpo_steps_are_the_same_over_context_parallel_ranks(rank: int, models: Paths, scratch: Path) -> None:
    """The whole trainer, real packing and padding included. Weight decay 0.1 must not move a frozen indexer by a bit;
    a trained one moves, and nothing else notices."""
    import torch

    from tests.helpers.trainer import trainer_args
    from tests.helpers.trainer_runs import GRPO, SMOOTH_ADAM, open_trainer, train_rollouts

    path, found = models["glm5_2"], {}
    loss = ("--dsa-indexer-loss-coeff", "0.5")
    for name, flags in {"alone": (), "cp2": CP2, "cp2, trained": (*CP2, *loss)}.items():
        args = trainer_args("glm5_2", path, *SMOOTH_ADAM, *flags, ref_load=str(path), **GRPO)
        with open_trainer(args, rank, WORLD, with_ref=True) as trainer:
            before = exported(trainer.args, trainer._state.model)
            metrics = train_rollouts(trainer, range(1))[0]
            found[name] = metrics, exported(trainer.args, trainer._state.model)
        logging.disable(logging.INFO)
        for key, tensor in before.items():
            moved = not torch.equal(tensor, found[name][1][key])
            still = ".indexer." in key and "trained" not in name or "e_score_correction_bias" in key
            assert moved != still, (name, key)
        assert ("train/indexer_kl" in metrics) == ("trained" in name)
    metrics, weights = found["alone"]
    assert metrics["train/grad_norm"] > 0.1
    for key, value in metrics.items():
        assert abs(found["cp2"][0][key] - value) < 1e-5 * (1 + abs(value)), (key, value, found["cp2"][0][key])
    for name, (_, after) in found.items():
        for key, tensor in weights.items():
            if ".indexer." not in key or "trained" not in name:
                assert (after[key] - tensor).abs().max() < 1e-5, (name, key)


def check_ties_are_counted_alike_over_ranks(rank: int, models: Paths, scratch: Path) -> None:
    """Layer 0 of 8, one of four that choose, scores every token 0: of its queries those with more than index_topk
    tokens have a tie. Padding, up to 63 tokens in a row, has them too and does not count."""
    from safetensors.torch import load_file, save_file

    from tests.helpers.trainer import make_rollout, trainer_args
    from tests.helpers.trainer_runs import open_trainer, train_rollouts

    path = scratch / "glm5_2"
    shutil.copytree(models["glm5_2"], path, ignore=shutil.ignore_patterns("reference"))
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.self_attn.indexer.weights_proj.weight"].zero_()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    lengths = make_rollout(0, samples=8, without_response=7)["total_lengths"]
    wanted = sum(max(length - 8, 0) for length in lengths) / (4 * sum(lengths))
    assert wanted > 0.05
    for flags in ((), CP2, FULL):
        args = trainer_args("glm5_2", path, *flags, global_batch_size=8, data_pad_size_multiplier=64)
        with open_trainer(args, rank, WORLD) as trainer:
            (metrics,) = train_rollouts(trainer, range(1))
        logging.disable(logging.INFO)
        assert abs(metrics["train/indexer_ties"] - wanted) < 1e-6, (flags, metrics["train/indexer_ties"], wanted)


def check_bfloat16_leaves_routing_biases_exact(rank: int, models: Paths, scratch: Path) -> None:
    """Float16Module casts buffers too; a routing bias rounded to bfloat16 would choose other experts."""
    import torch
    from safetensors.torch import load_file

    from tests.helpers.trainer import trainer_args
    from tests.helpers.trainer_runs import GRPO, open_trainer, train_rollouts

    path = models["glm5_2"]
    on_disk = load_file(path / "model.safetensors")
    args = trainer_args("glm5_2", path, "--bf16", **(GRPO | {"bf16": True, "use_kl_loss": False}))
    with open_trainer(args, rank, WORLD) as trainer:
        assert trainer._state.model[0].module.module.decoder.layers[0].mlp.linear_fc1.weight.dtype == torch.bfloat16
        metrics = train_rollouts(trainer, range(1))[0]
        biases = {
            name: buffer for name, buffer in trainer._state.model[0].named_buffers() if name.endswith("expert_bias")
        }
        assert metrics["train/grad_norm"] > 0.1 and len(biases) == 7
        for name, bias in biases.items():
            layer = int(name.split("layers.")[1].split(".")[0])
            assert bias.dtype == torch.float32
            assert torch.equal(bias, on_disk[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]), name
    logging.disable(logging.INFO)


def compare_with_reference(args: Any, chunks: list, path: Path, what: str) -> None:
    """Every logit within 1e-4, every gradient within 1e-4 of the largest of its tensor."""
    import torch
    from safetensors.torch import load_file

    wanted = torch.load(path / "reference" / "logits.pt")
    logits, gradients = logits_and_gradients(args, chunks)
    for number, got in logits.items():
        right = _local(wanted[number], ROWS[number])
        assert right.abs().max() > 0.5
        error = float((got - right).abs().max())
        assert error < 1e-4, (what, number, error)
    right = load_file(path / "reference" / "gradients" / "model.safetensors")
    gradients = {name: tensor for name, tensor in gradients.items() if not name.endswith("e_score_correction_bias")}
    right = {name: tensor for name, tensor in right.items() if not name.endswith("e_score_correction_bias")}
    assert gradients.keys() == right.keys()
    for name, tensor in right.items():
        error, scale = float((gradients[name] - tensor).abs().max()), float(tensor.abs().max())
        assert scale > 0 or ".indexer." in name or ".experts." in name, name  # an expert nobody chose
        assert error <= 1e-4 * scale, (what, name, error, scale)


def logits_and_gradients(args: Any, chunks: list) -> tuple[dict[int, Any], dict[str, Any]]:
    """({row: logits [local tokens, vocabulary] on the last stage}, gradients of everything under checkpoint names).

    Of the mean over rows of the mean cross entropy, by Megatron's schedule and its reduction over all ranks.
    """
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(chunk.config, options, chunk) for chunk in chunks]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.train()
    mine = rows(args.vocab_size)[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
    results = get_forward_backward_func()(
        forward_step_func=partial(_forward, args.vocab_size),
        data_iterator=[iter(mine) for _ in wrapped] if len(wrapped) > 1 else iter(mine),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(mine),
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    logits = {result["row"]: result["logits"] for result in results}
    with torch.no_grad():
        for chunk in chunks:
            for param in chunk.parameters():
                param.data = param.main_grad if param.requires_grad else torch.zeros_like(param)
    return logits, exported(args, chunks)


def _forward(vocab_size: int, batches: Any, model: Any) -> tuple[Any, Any]:
    import torch

    from tests.helpers.tiny_megatron import packed_params

    row, tokens, labels, lengths = next(batches)
    tokens, labels = _local(tokens, lengths), _local(labels, lengths)
    positions = torch.arange(tokens.numel())[None]
    out = model(tokens[None], positions, None, packed_seq_params=packed_params(lengths))
    return out, partial(_mean_loss, vocab_size, row, labels)


def _mean_loss(vocab_size: int, row: int, labels: Any, out: Any) -> tuple[Any, dict[str, Any]]:
    """Megatron multiplies by cp and divides by the row count of this rank; its reduction averages over dp x cp."""
    import torch
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    logits = gather_from_tensor_model_parallel_region(out)[0, :, :vocab_size]
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / TOKENS
    return loss, {"row": row, "logits": logits.detach().clone()}


def _local(row: Any, lengths: Sequence[int]) -> Any:
    """What this context-parallel rank holds of a row [tokens, ...]."""
    from megatron.core import parallel_state as mpu

    from tests.helpers.tiny_megatron import zigzag

    size = mpu.get_context_parallel_world_size()
    return row if size == 1 else zigzag(row, lengths, size, mpu.get_context_parallel_rank())
