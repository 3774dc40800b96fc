"""The run's metrics on their way out: progress display, a JSON-lines file, Weights & Biases, TensorBoard.

Only the driver has one of these; every other process returns its metrics as a flat dict.
"""

import json
import logging
import math
import secrets
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Protocol

from slime.observability.progress import make_progress

logger = logging.getLogger(__name__)

# Metric families and the step they are drawn against. What the trainer reports is the mean over a rollout's steps.
STEP_OF_FAMILY = {
    "train": "rollout/step",
    "rollout": "rollout/step",
    "multi_turn": "rollout/step",
    "passrate": "rollout/step",
    "perf": "rollout/step",
    "eval": "eval/step",
}
SECRET_ARGS = ("wandb_key",)


class Writer(Protocol):
    """Where metrics go."""

    def write(self, step: int, step_key: str, metrics: dict[str, float]) -> None: ...

    def close(self, status: str) -> None: ...


class Tracking:
    """Sends each step's metrics to every destination that `args` asks for.

    Raises ValueError or ImportError at construction when a destination cannot be used, not after the first step.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._writers: list[Writer] = [make_progress(args.progress, args.num_rollout)]
        if args.metrics_jsonl:
            self._writers.append(JsonLines(Path(args.metrics_jsonl)))
        if args.use_wandb:
            self._writers.append(WandB(args))
        if args.use_tensorboard:
            self._writers.append(TensorBoard(args))

    def log(self, step: int, metrics: dict[str, float], step_key: str = "rollout/step") -> None:
        """step: running number under `step_key`. metrics: flat dict name -> number."""
        if self._args.wandb_always_use_train_step:
            samples = self._args.rollout_batch_size * self._args.n_samples_per_prompt
            step = step * samples // self._args.global_batch_size
        for writer in self._writers:
            writer.write(step, step_key, metrics)

    def close(self, status: str) -> None:
        """status: "finished" or "failed"."""
        for writer in self._writers:
            writer.close(status)


class JsonLines:
    """One JSON object a line: the step under its key, `time` (Unix seconds), and the metrics; NaN and inf become null.

    A resumed run appends, so a step can appear twice; readers take the last.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, step_key: str, metrics: dict[str, float]) -> None:
        row: dict[str, Any] = {step_key: step, "time": time.time()}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self, status: str) -> None:
        self._file.close()


class WandB:
    """One Weights & Biases run. The configuration is every argument but secrets, the critic's as critic/<name>."""

    def __init__(self, args: Namespace) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("--use-wandb needs the wandb package: pip install 'slime[wandb]'") from error
        if args.wandb_key and args.wandb_mode not in ("offline", "disabled"):
            wandb.login(key=args.wandb_key, host=args.wandb_host)
        group = args.wandb_group
        if group and args.wandb_random_suffix:
            group = f"{group}_{secrets.token_hex(4)}"
        config = {name: value for name, value in vars(args).items() if name not in (*SECRET_ARGS, "critic_args")}
        critic = {} if args.critic_args is None else vars(args.critic_args)
        config |= {f"critic/{name}": value for name, value in critic.items() if name in config}
        self._run = wandb.init(
            entity=args.wandb_team,
            project=args.wandb_project,
            group=group,
            name=group,
            id=args.wandb_run_id,
            resume="allow" if args.wandb_run_id else None,
            mode=args.wandb_mode,
            dir=args.wandb_dir,
            config=config,
        )
        for family, step_key in STEP_OF_FAMILY.items():
            self._run.define_metric(step_key)
            self._run.define_metric(f"{family}/*", step_metric=step_key)

    def write(self, step: int, step_key: str, metrics: dict[str, float]) -> None:
        self._run.log(metrics | {step_key: step})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class TensorBoard:
    """Event files in <--tb-project-name>/<--tb-experiment-name or time> below tensorboard_log."""

    def __init__(self, args: Namespace) -> None:
        if not args.tb_project_name:
            raise ValueError("--use-tensorboard needs --tb-project-name, the directory below tensorboard_log")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("--use-tensorboard needs the tensorboard package: pip install tensorboard") from error
        name = args.tb_experiment_name or time.strftime("%Y%m%d-%H%M%S")
        self._writer = SummaryWriter(Path("tensorboard_log") / args.tb_project_name / name)

    def write(self, step: int, step_key: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        self._writer.close()
