"""Learning rate and weight decay over a run, and what a resumed run does when its schedule is not the checkpoint's."""

from argparse import Namespace
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# Key of the checkpoint's schedule -> what a person calls it. Lengths are in samples.
_NAMES = {
    "max_lr": "learning rate (--lr)",
    "min_lr": "smallest learning rate (--min-lr)",
    "lr_warmup_steps": "warm-up in samples",
    "lr_decay_steps": "learning-rate decay in samples",
    "lr_decay_style": "decay style (--lr-decay-style)",
    "start_wd": "first weight decay",
    "end_wd": "last weight decay",
    "wd_incr_steps": "weight-decay schedule in samples",
    "wd_incr_style": "weight-decay style (--weight-decay-incr-style)",
}


def make_schedule(args: Namespace, optimizer: Any) -> "Schedule":
    """The run's schedule, counted in samples: iterations of the flags times global_batch_size."""
    batch = args.global_batch_size
    decay_iters = args.lr_decay_iters or args.train_iters
    if args.lr_warmup_fraction is not None:
        warmup_steps = args.lr_warmup_fraction * decay_iters * batch
    else:
        warmup_steps = args.lr_warmup_iters * batch
    return Schedule(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=None if args.lr_wsd_decay_iters is None else args.lr_wsd_decay_iters * batch,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


class Schedule(OptimizerParamScheduler):
    """Megatron's schedule, whose state in a checkpoint may come from a run of another length."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the checkpoint's schedule stood.

        A length without effect (of a constant learning rate or weight decay) may differ. Raises ValueError, unless one
        of the two flags it names says which schedule to follow, when anything else does.
        """
        mine = self.state_dict()
        free = {"lr_decay_steps"} if self._keeps(mine, state_dict, "lr_decay_style") else set()
        free |= {"wd_incr_steps"} if self._keeps(mine, state_dict, "wd_incr_style") else set()
        state_dict = state_dict | {key: mine[key] for key in free}
        differences = [
            f"{name} was {state_dict[key]}, is {mine[key]}"
            for key, name in _NAMES.items()
            if key in state_dict and state_dict[key] != mine[key]
        ]
        if differences and not (self.override_opt_param_scheduler or self.use_checkpoint_opt_param_scheduler):
            raise ValueError(
                f"the checkpoint in --load was saved with another schedule: {'; '.join(differences)}. "
                "(Lengths follow --num-rollout unless --lr-decay-iters is given.) Pass --override-opt-param-scheduler "
                "to follow this command line, or --use-checkpoint-opt-param-scheduler to follow the checkpoint"
            )
        super().load_state_dict(state_dict)

    @staticmethod
    def _keeps(mine: dict[str, Any], theirs: dict[str, Any], style: str) -> bool:
        return mine[style] == theirs.get(style) == "constant"
