"""What runs in the ranks of multi-token-prediction tests: the layer against its formulas, and training with it."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.helpers.mtp_reference import AROUND, PREFIX, Reference

MTP = ("--mtp-num-layers", "1")
MIMO = "model.mtp_layers.0."
MIMO_NAMES = {
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "eh_proj.": "input_proj.",
    "shared_head.norm.": "final_layernorm.",
}


def as_mimo(weights: dict[str, Any]) -> dict[str, Any]:
    """The prediction layer of a Qwen2 under MiMo's names, whose projection reads the hidden state first."""
    import torch

    out = {}
    for key, tensor in weights.items():
        if key.startswith(PREFIX):
            key = MIMO + key.removeprefix(PREFIX)
            for ours, theirs in MIMO_NAMES.items():
                key = key.replace(ours, theirs)
            if "input_proj" in key:
                tensor = torch.cat(tensor.chunk(2, 1)[::-1], 1)
        out[key] = tensor
    return out


Models = dict[str, tuple[str, Path, Path]]


def repeated(runs: int) -> tuple[str, ...]:
    """Flags of one layer that runs so many times and predicts as many tokens."""
    return ("--mtp-num-layers", str(runs), "--mtp-use-repeated-layer")


def against_the_formulas(rank: int, world_size: int, models: Models, scratch: Path) -> None:
    """Loss and gradients of each model, packed in two ragged micro-batches; of some also when the layer repeats.

    models: name -> (kind of tiny model, directory, directory of the same weights in a form transformers reads).
    """
    losses = {}
    for name, (kind, path, readable) in models.items():
        for runs in {"glm4_moe": (1, 3), "glm_moe_dsa": (1, 2), "glm_moe_dsa_once": (2, 3)}.get(name, (1,)):
            directory = scratch / f"{name}_{runs}"
            directory.mkdir()
            reference = Reference(kind, readable, directory)
            losses[name, runs] = _against_the_formulas(rank, world_size, name, kind, path, reference, runs)
    once, anew = losses["glm_moe_dsa_once", 2], losses["glm_moe_dsa", 2]
    assert once[0] == anew[0] and abs(once[1] - anew[1]) > 1e-3, "the choice of tokens makes no difference"


def _against_the_formulas(
    rank: int, world_size: int, name: str, kind: str, path: Path, reference: Reference, runs: int
) -> list[float]:
    import torch
    from safetensors.torch import load_file

    from tests.helpers.bridge_runs import built, exported, load

    data, batches = _rollout()
    columns = (data["tokens"], data["response_lengths"], data["loss_masks"])
    losses = reference.losses(*columns, runs, chooses_once=name.endswith("_once"))
    (sum(losses) / runs).backward()
    gradients = reference.gradients()
    flags = MTP if runs == 1 else repeated(runs)
    with built(rank, world_size, kind, path, flags, enable_mtp_training=True) as (args, chunks):
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        load(args, chunks, path)
        MTPLossAutoScaler.set_loss_scale(torch.tensor(1 / len(batches)))  # as the schedule does
        metrics = _backward(args, chunks[0], data, batches)
        wanted = {f"mtp_{number}_loss": loss.item() for number, loss in enumerate(losses, 1)}
        wanted["mtp_loss"] = sum(wanted.values()) / runs
        assert metrics.keys() == wanted.keys()
        assert all(abs(metrics[key] - value) < 1e-5 for key, value in wanted.items()), (name, runs, metrics, wanted)
        with torch.no_grad():
            for param in chunks[0].parameters():
                param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
        found = exported(args, chunks)
    assert found.keys() == load_file(path / "model.safetensors").keys(), name  # the layer once, however often it runs
    gradients = as_mimo(gradients) if name == "mimo" else gradients
    assert len(gradients) > len(AROUND) + 8
    for key, gradient in gradients.items():
        error = (found.pop(key) / args.mtp_loss_scaling_factor - gradient).abs().max()
        assert error < 1e-5 * (1 + gradient.abs().max()), (name, runs, key, error)
        assert ".experts." in key or "indexer" in key or gradient.abs().max() > 1e-5, (name, key)
    for key, gradient in found.items():
        assert "correction_bias" in key or not gradient.any(), f"{name}: {key} has a gradient"
    return [loss.item() for loss in losses]


def _rollout() -> tuple[dict[str, Any], list[list[int]]]:
    """Ragged samples, among them the shortest ones, and the samples of each micro-batch."""
    import torch

    from tests.helpers.trainer import make_rollout

    made = make_rollout(5, samples=7, prompt=(1, 9), response=(6, 14))
    data = {key: made[key] for key in ("tokens", "response_lengths", "loss_masks")}
    for tokens, response in ((4, 0), (2, 1), (3, 2), (3, 1)):
        data["tokens"].append(torch.arange(5, 5 + tokens))
        data["response_lengths"].append(response)
        data["loss_masks"].append(torch.ones(response, dtype=torch.int32))
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    return data, [[3, 8, 0, 10, 5], [7, 9, 6, 1, 4, 2]]


def _backward(args: Any, chunk: Any, data: dict[str, Any], batches: list[list[int]]) -> dict[str, float]:
    import torch

    from slime.backends.megatron_utils.data import TRAIN_KEYS, DataIterator, get_batch
    from slime.backends.megatron_utils.mtp import PredictionLoss

    iterator = DataIterator(data, batches)
    step = PredictionLoss(args, iterator, len(batches))
    for _ in batches:
        batch = get_batch(iterator, TRAIN_KEYS, 8)
        packed = batch["packed_seq_params"]
        plain = chunk(batch["tokens"], None, None, packed_seq_params=packed).detach()
        out = chunk(batch["tokens"], None, None, packed_seq_params=packed, **step.arguments(batch))
        assert torch.equal(out, plain), "the prediction loss changed what the model returns"
        (0 * out).sum().backward()
    return step.metrics(Namespace(grad_norms_by_group={}))


def depths_equal_plain_loops() -> None:
    """Three depths of random rows on every rank of 1, 2 and 3 context-parallel ones, token by token."""
    import torch

    from slime.backends.megatron_utils.cp_utils import ParallelState
    from slime.backends.megatron_utils.mtp import make_depths
    from tests.helpers.trainer import make_rollout

    for seed in range(12):
        cp = 1 + seed % 3
        data = make_rollout(seed, samples=5, prompt=(1, 7), response=(1, 9), without_response=seed % 5)
        columns = [data[key] for key in ("tokens", "response_lengths", "loss_masks")]
        for rank in range(cp):
            positions: list[tuple[int, int]] = []  # (sample, position in it) of each local token
            for number, tokens in enumerate(columns[0]):
                chunk = -(-len(tokens) // (2 * cp))
                pieces = (rank, 2 * cp - 1 - rank) if cp > 1 else (0, 1)
                local = [piece * chunk + i for piece in pieces for i in range(chunk)]
                positions += [(number, t) for t in local if cp > 1 or t < len(tokens)]
            tail = 3
            parallel = ParallelState(cp_rank=rank, cp_size=cp)
            for depth, found in enumerate(make_depths(*columns, len(positions) + tail, 3, parallel)):
                read, rows = [0] * (len(positions) + tail), []
                for row, (number, t) in enumerate(positions):
                    tokens, response, mask = (column[number] for column in columns)
                    if t + depth + 1 < len(tokens):
                        read[row] = int(tokens[t + depth + 1])
                    target = t + depth + 2
                    if len(tokens) - response <= target < len(tokens):
                        rows.append((row, int(tokens[target]), float(mask[target - len(tokens) + response])))
                assert found.tokens.tolist() == [read], (seed, rank, depth)
                mine = zip(found.rows.tolist(), found.targets.tolist(), found.mask.tolist(), strict=True)
                assert list(mine) == rows, (seed, rank, depth)
                assert found.rows.dtype == found.targets.dtype == torch.int64


def train(rank: int, world_size: int, runs: dict[str, tuple[str, Path, tuple[str, ...], dict[str, Any]]]) -> dict:
    """Of each (model, directory, flags, values): the metrics of one GRPO rollout, and the weights after it."""
    from tests.helpers.bridge_runs import exported
    from tests.helpers.trainer import trainer_args
    from tests.helpers.trainer_runs import GRPO, SMOOTH_ADAM, open_trainer, train_rollouts

    found = {}
    for key, (name, path, flags, values) in runs.items():
        options = GRPO | {"use_kl_loss": False, "enable_mtp_training": True} | values
        factor = ("--mtp-loss-scaling-factor", str(options.pop("mtp_loss_scaling_factor", 0.2)))
        args = trainer_args(name, path, *SMOOTH_ADAM, *MTP, *factor, *flags, **options)
        with open_trainer(args, rank, world_size) as trainer:
            (metrics,) = train_rollouts(trainer, range(1))
            weights = exported(trainer.args, trainer._state.model)
        found[key] = (metrics, {name: tensor.float().numpy() for name, tensor in weights.items()})
    return found if rank == 0 else {}


def learn(rank: int, world_size: int, path: Path) -> list[float]:
    """The prediction loss of a tiny glm4_moe whose prediction layer alone trains, ten times on the same rollout."""
    from tests.helpers.trainer import make_rollout, rank_share, trainer_args
    from tests.helpers.trainer_runs import open_trainer

    values = {"enable_mtp_training": True, "only_train_params_name_list": [r"^mtp\."], "lr": 1e-2}
    with open_trainer(trainer_args("glm4_moe", path, *MTP, **values), rank, world_size) as trainer:
        share = rank_share(trainer.args, trainer.parallel_config, trainer.dp_rank, make_rollout(0))
        return [trainer.train(step, share)["train/mtp_loss"] for step in range(10)]


def resume(rank: int, world_size: int, path: Path, save: Path) -> list[tuple[dict[str, float], dict[str, Any]]]:
    """Metrics and weights of the second of two rollouts: trained in a row, and after a checkpoint between them."""
    from tests.helpers.bridge_runs import exported
    from tests.helpers.trainer import trainer_args
    from tests.helpers.trainer_runs import open_trainer, train_rollouts

    values = {"enable_mtp_training": True, "global_batch_size": 4, "save": str(save), "load": str(save)}
    found = []
    for _ in range(2):
        with open_trainer(trainer_args("glm4_moe", path, *MTP, **values), rank, world_size) as trainer:
            if trainer.start_rollout_id == 0:
                train_rollouts(trainer, range(1))
                trainer.save_model(0)
            assert trainer.start_rollout_id == len(found)
            (metrics,) = train_rollouts(trainer, range(1, 2))
            weights = exported(trainer.args, trainer._state.model)
        found.append((metrics, {name: tensor.float().numpy() for name, tensor in weights.items()}))
    return found


def refusal(rank: int, world_size: int, path: Path, save: Path) -> str:
    """What is said when a checkpoint without prediction layers is loaded into a model with one."""
    from tests.helpers.trainer import trainer_args
    from tests.helpers.trainer_runs import open_trainer, train_rollouts

    values = {"save": str(save), "load": str(save)}
    with open_trainer(trainer_args("glm4_moe", path, **values), rank, world_size) as trainer:
        train_rollouts(trainer, range(1))
        trainer.save_model(0)
    try:
        with open_trainer(trainer_args("glm4_moe", path, *MTP, **values), rank, world_size):
            return "loaded"
    except ValueError as error:
        return str(error)


def formulas_and_training(rank: int, world_size: int, models: Models, scratch: Path, runs: dict) -> dict:
    """All of it, in one process."""
    against_the_formulas(rank, world_size, models, scratch)
    depths_equal_plain_loops()
    path = models["glm4_moe"][1]
    return train(rank, world_size, runs) | {
        "learnt": learn(rank, world_size, path),
        "resumed": resume(rank, world_size, path, scratch / "save"),
        "refused": refusal(rank, world_size, path, scratch / "without"),
    }
