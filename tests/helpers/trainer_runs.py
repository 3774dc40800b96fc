"""What runs in the ranks of trainer tests: one process builds and closes several trainers in turn."""

import contextlib
import logging
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.trainer import make_rollout, rank_share, trainer_args

# A reference model, an entropy bonus, two optimizer steps a rollout (so old log-probs are computed and differ from
# the current ones in the second step). With eps 1 Adam's update is a smooth function of the gradient: equal weights
# after a step mean equal gradients, element by element.
GRPO = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.3,
    "kl_loss_type": "low_var_kl",
    "entropy_coef": 0.01,
    "global_batch_size": 4,
    "clip_grad": 0.0,
    "lr": 0.3,
}
SMOOTH_ADAM = ("--adam-eps", "1.0")


@contextlib.contextmanager
def open_trainer(args: Namespace, rank: int, world_size: int, with_ref: bool = False) -> Iterator[Any]:
    """A MegatronTrainer in the process group this rank is in already."""
    from slime.backends.megatron_utils.actor import MegatronTrainer

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    trainer = MegatronTrainer(args, rank=rank, world_size=world_size, local_rank=rank, with_ref=with_ref)
    try:
        yield trainer
    finally:
        trainer.close()


def train_rollouts(trainer: Any, rollout_ids: range, samples: int = 8) -> list[dict[str, float]]:
    """Metrics of each rollout, the same on every rank; rollout i is `make_rollout(i)`.

    Its last sample has no response: in every layout such a sample flows through and changes nothing.
    """
    import torch.distributed as dist

    collected = []
    for rollout_id in rollout_ids:
        data = make_rollout(rollout_id, samples, without_response=samples - 1)
        share = rank_share(trainer.args, trainer.parallel_config, trainer.dp_rank, data)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, trainer.train(rollout_id, share))
        (metrics,) = [m for m in everyone if m is not None]  # exactly one rank reports
        collected.append({k: v for k, v in metrics.items() if not k.startswith("perf/")})
    return collected


def hf_weights(trainer: Any) -> dict[str, Any]:
    """The whole model under Hugging Face names (from all pipeline stages), as numpy arrays."""
    import torch.distributed as dist

    from slime.backends.megatron_utils.update_weight.common import hf_buckets

    mine = {
        name: tensor.detach().float().cpu().numpy().copy()
        for bucket in hf_buckets(trainer.args, trainer._state.model, 1 << 30)
        for name, tensor in bucket
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: array for part in everyone for name, array in part.items()}


def run_layouts(
    rank: int, world_size: int, hf: str, layouts: dict[str, tuple[list[str], dict[str, Any]]], model: str = "qwen3"
) -> dict:
    """Per layout (Megatron flags, namespace values): metrics of two GRPO rollouts and the weights after them."""
    results = {}
    for name, (flags, values) in layouts.items():
        args = trainer_args(model, hf, *SMOOTH_ADAM, *flags, ref_load=hf, **(GRPO | values))
        with open_trainer(args, rank, world_size, with_ref=True) as trainer:
            metrics = train_rollouts(trainer, range(2))
            results[name] = (metrics, hf_weights(trainer))
    return results if rank == 0 else {}


def run_resume(rank: int, world_size: int, hf: str, save: str, flags: list[str], others: dict[str, list[str]]) -> dict:
    """Train four rollouts, saving after the second; then resume from there, in the same layout and in `others`."""
    values: dict[str, Any] = {"global_batch_size": 4, "save": save, "load": save, "save_interval": 2}
    decay = ("--lr-decay-style", "linear", "--lr-decay-iters", "20", "--lr-warmup-iters", "3")
    args = trainer_args("qwen3", hf, *decay, *flags, **values)
    with open_trainer(args, rank, world_size) as trainer:
        first_id = trainer.start_rollout_id
        train_rollouts(trainer, range(2))
        trainer.save_model(1)
        expected = (train_rollouts(trainer, range(2, 4)), hf_weights(trainer))
    results: dict[str, Any] = {"first_id": first_id, "expected": expected}
    for name, other in {"same": flags, **others}.items():
        with open_trainer(trainer_args("qwen3", hf, *decay, *other, **values), rank, world_size) as trainer:
            start = trainer.start_rollout_id
            results[name] = (start, train_rollouts(trainer, range(start, 4)), hf_weights(trainer))
    return results if rank == 0 else {}


def hf_log_probs(hf: str | Path, data: dict[str, Any]) -> list[Any]:
    """Log-probability of every response token by transformers, one sample at a time."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    columns = []
    with torch.no_grad():
        for tokens, response in zip(data["tokens"], data["response_lengths"], strict=True):
            scores = torch.log_softmax(model(tokens[None]).logits[0], -1)
            picked = scores[:-1].gather(1, tokens[1:, None]).squeeze(1)
            columns.append(picked[-response:])
    return columns
