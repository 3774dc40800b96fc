"""What runs in the ranks of critic tests: a critic trains, then an actor on its values, in one process, in turn."""

import contextlib
import logging
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.utils.arguments.role_config import CRITIC
from tests.helpers.trainer import make_rollout, rank_share, trainer_args
from tests.helpers.trainer_runs import SMOOTH_ADAM, hf_weights

# Two optimizer steps a rollout: in the second, values have moved away from those that the clip refers to.
PPO: dict[str, Any] = {
    "advantage_estimator": "ppo",
    "gamma": 0.9,
    "lambd": 0.7,
    "value_clip": 0.01,
    "global_batch_size": 4,
    "clip_grad": 0.0,
    "lr": 0.03,
}


def critic_args(hf: str | Path, *flags: str, **values: Any) -> Namespace:
    """What `trainer_args` gives an actor, for the critic beside it."""
    return Namespace(**{**vars(trainer_args("qwen3", hf, *flags, **values)), **CRITIC})


@contextlib.contextmanager
def open_role(args: Namespace, rank: int = 0, world_size: int = 1, with_ref: bool = False) -> Iterator[Any]:
    """A MegatronTrainer for the role that these arguments are for, in the process group this rank is in already."""
    from slime.backends.megatron_utils.actor import MegatronTrainer

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    role = "critic" if args.loss_type == "value_loss" else "actor"
    trainer = MegatronTrainer(args, role, rank, world_size, local_rank=rank, with_ref=with_ref)
    try:
        yield trainer
    finally:
        trainer.close()


def share_of(trainer: Any, rollout_id: int) -> dict[str, Any]:
    """This rank's part of `make_rollout(rollout_id)`, whose last sample has no response."""
    data = make_rollout(rollout_id, without_response=7)
    return rank_share(trainer.args, trainer.parallel_config, trainer.dp_rank, data)


def train(trainer: Any, rollout_ids: range, values: dict[int, Any] | None = None) -> tuple[list[dict], dict[int, Any]]:
    """Metrics of each rollout, the same on every rank, and what this rank's critic has for the actor by rollout id."""
    import torch.distributed as dist

    collected, kept = [], {}
    for rollout_id in rollout_ids:
        critic_data = None if values is None else values[rollout_id]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, trainer.train(rollout_id, share_of(trainer, rollout_id), critic_data))
        (metrics,) = [m for m in everyone if m is not None]  # exactly one rank reports
        collected.append({k: v for k, v in metrics.items() if not k.startswith("perf/")})
        kept[rollout_id] = trainer.values() if trainer.args.loss_type == "value_loss" else None
    return collected, kept


def stored_weights(checkpoint: str | Path) -> dict[str, Any]:
    """Whole weights in one iteration's directory of a Megatron checkpoint, as numpy arrays by key."""
    import torch
    from megatron.core import dist_checkpointing

    stored = dist_checkpointing.load_plain_tensors(str(checkpoint))
    weights = {k: v for k, v in stored.items() if isinstance(v, torch.Tensor) and not k.startswith("optimizer")}
    return {key: tensor.float().numpy().copy() for key, tensor in weights.items()}


def run_ppo(rank: int, world_size: int, hf: str, scratch: str, layouts: dict[str, tuple[list[str], dict]]) -> dict:
    """Per layout (Megatron flags, namespace values): the critic's metrics of two rollouts and its weights after them,
    then the actor's on the critic's values."""
    results = {}
    for name, (flags, values) in layouts.items():
        save = f"{scratch}/{name.replace(' ', '_')}"
        settings = PPO | values
        with open_role(critic_args(hf, *SMOOTH_ADAM, *flags, save=save, **settings), rank, world_size) as critic:
            critic_metrics, kept = train(critic, range(2))
            critic.save_model(1)
            critic_weights = stored_weights(Path(save) / "iter_0000001")
        with_ref = {"kl_coef": 0.2, "ref_load": hf, "normalize_advantages": True}
        args = trainer_args("qwen3", hf, *SMOOTH_ADAM, *flags, **(settings | with_ref))
        with open_role(args, rank, world_size, with_ref=True) as actor:
            actor_metrics, _ = train(actor, range(2), kept)
            results[name] = (critic_metrics, critic_weights, actor_metrics, hf_weights(actor))
    return results if rank == 0 else {}
