"""The live display of a run in the terminal, and its plain form for logs.

Fed with the same metrics as every other destination; knows only their names.
"""

import re
import sys
import time
from collections import deque

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48

# label, metric, format; a metric that a run does not have (an SFT run has no reward) is left out
FIGURES = (
    ("reward", "rollout/raw_reward", "{:.3f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("response length", "rollout/response_len/mean", "{:.1f}"),
    ("|logp train - rollout|", "train/train_rollout_logprob_abs_diff", "{:.1e}"),
    ("grad norm", "train/grad_norm", "{:.3f}"),
    ("tokens/s per GPU", "perf/tokens_per_gpu_per_sec", "{:.0f}"),
    ("TFLOP/s per GPU", "perf/actor_train_tflops", "{:.3g}"),
    ("MFU", "perf/actor_train_mfu", "{:.1%}"),
)
PHASES = ("generate", "train", "save", "sync")
EVAL_SUFFIX = re.compile(r"-(truncated_ratio|pass@\d+)$")  # what follows a data set's name, which may have a "-" too


def make_progress(mode: str, total: int | None) -> "PlainProgress | RichProgress | NoProgress":
    """mode: "rich", "plain", "none", or "auto" (rich on a terminal, else plain). total: steps of the run, if known."""
    if mode == "auto":
        mode = "rich" if sys.stderr.isatty() else "plain"
    return {"rich": RichProgress, "plain": PlainProgress, "none": NoProgress}[mode](total)


def figures(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """(label, text) of what a person wants to read of a step, in order."""
    return [(label, form.format(metrics[name])) for label, name, form in FIGURES if name in metrics]


def phase_times(metrics: dict[str, float]) -> list[tuple[str, float]]:
    """(phase, seconds) of the step's phases that took time."""
    return [(phase, metrics[f"perf/{phase}_time"]) for phase in PHASES if f"perf/{phase}_time" in metrics]


def sparkline(values: list[float]) -> str:
    """The values as one line of block characters, the lowest to the highest of them."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((value - low) * scale)] for value in values)


def evaluations(metrics: dict[str, float]) -> str:
    """The mean rewards among evaluation metrics (`eval/<dataset>`, nothing below or behind it)."""
    means = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.count("/") == 1}
    return ", ".join(f"{name} {value:.3f}" for name, value in means.items() if not EVAL_SUFFIX.search(name))


class NoProgress:
    """Shows nothing."""

    def __init__(self, total: int | None) -> None:
        pass

    def write(self, step: int, step_key: str, metrics: dict[str, float]) -> None:
        pass

    def close(self, status: str) -> None:
        pass


class PlainProgress:
    """One line a step on stderr."""

    def __init__(self, total: int | None) -> None:
        self._total = total

    def write(self, step: int, step_key: str, metrics: dict[str, float]) -> None:
        if step_key == "eval/step":
            line = f"eval after {step} rollouts: {evaluations(metrics)}"
        else:
            of = f"/{self._total}" if self._total else ""
            parts = [f"{label} {text}" for label, text in figures(metrics)]
            parts += [f"{phase} {seconds:.1f}s" for phase, seconds in phase_times(metrics)]
            line = f"step {step + 1}{of}: " + "  ".join(parts)
        print(line, file=sys.stderr, flush=True)

    def close(self, status: str) -> None:
        pass


class RichProgress:
    """A panel that stays at the bottom of the terminal: bar, time left, figures, phase times, the reward's curve."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._total = total
        self._started: tuple[int, float] | None = None  # first step of this run, and when it was done
        self._curve: deque[float] = deque(maxlen=SPARK_WIDTH)
        self._evaluation = ""
        self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=False)
        self._live.start()

    def write(self, step: int, step_key: str, metrics: dict[str, float]) -> None:
        if step_key == "eval/step":
            self._evaluation = f"after {step} rollouts: {evaluations(metrics)}"
            return
        if self._started is None:
            self._started = (step, time.monotonic())
        self._curve.append(metrics.get("rollout/raw_reward", metrics.get("train/loss", 0.0)))
        self._live.update(self._panel(step, metrics))

    def close(self, status: str) -> None:
        self._live.stop()

    def _panel(self, step: int, metrics: dict[str, float]):
        from rich.console import Group
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for label, text in figures(metrics):
            table.add_row(label, f"[bold]{text}")
        times = phase_times(metrics)
        table.add_row("seconds", "  ".join(f"{phase} [bold]{seconds:.2f}[/]" for phase, seconds in times))
        if self._evaluation:
            table.add_row("evaluation", f"[bold]{self._evaluation}")
        name = "reward" if "rollout/raw_reward" in metrics else "loss"
        table.add_row(f"{name}, last {len(self._curve)}", f"[green]{sparkline(list(self._curve))}")
        # A bar ends without a line break and would swallow the first row below it; padding ends its line.
        bar = Padding(ProgressBar(total=self._total or step + 1, completed=step + 1), 0)
        return Panel(Group(bar, table), title=f"step {step + 1}/{self._total or '?'}, {self._time_left(step)}")

    def _time_left(self, step: int) -> str:
        first, since = self._started
        if step == first or not self._total:
            return "time left unknown"
        left = (time.monotonic() - since) / (step - first) * (self._total - 1 - step)
        return f"{int(left // 60)} min {int(left % 60)} s left"
