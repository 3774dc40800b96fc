"""Draws the curves of a run from its --metrics-jsonl file and prints a summary table.

python tools/plot_metrics.py outputs/quickstart/metrics.jsonl --out outputs/quickstart/curves.png
"""

import argparse
import json
import re
from pathlib import Path

CURVES = (
    ("mean reward", ("rollout/raw_reward",)),
    ("response length (tokens)", ("rollout/response_len/mean",)),
    ("mean |log-prob train - rollout|", ("train/train_rollout_logprob_abs_diff",)),
    ("gradient norm", ("train/grad_norm",)),
    ("entropy", ("train/entropy_loss",)),
    ("seconds a step", ("perf/generate_time", "perf/train_time", "perf/sync_time")),
)
# Metrics with a better direction, in which the summary looks for the best value; so are evaluation rewards (larger).
BEST = {
    "rollout/raw_reward": max,
    "train/train_rollout_logprob_abs_diff": min,
    "perf/generate_time": min,
    "perf/train_time": min,
    "perf/sync_time": min,
}
# eval/<data set>, but not what is said about it: eval/<data set>-truncated_ratio, eval/<data set>-pass@4
EVAL_REWARD = re.compile(r"eval/(?!step$)(?![^/]*-(truncated_ratio|pass@\d+)$)[^/]+")
NO_ROW = 'not a metrics row, which is a JSON object with an integer "<family>/step"'
LOG_SCALE = {"train/train_rollout_logprob_abs_diff"}


def read_metrics(path: Path) -> dict[str, dict[int, dict[str, float]]]:
    """{step key: {step: metrics}}; where a resumed run repeats a step, its last row counts.

    Raises ValueError naming file and line of a row that is not a JSON object with a step.
    """
    table: dict[str, dict[int, dict[str, float]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: {NO_ROW} ({error})") from error
        key = next((name for name in row if name.endswith("/step")), None) if isinstance(row, dict) else None
        if key is None or not isinstance(row[key], int):
            raise ValueError(f"{path}:{number}: {NO_ROW}")
        table.setdefault(key, {})[row.pop(key)] = row
    return table


def series(steps: dict[int, dict[str, float]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, in order of the steps, where it is a number."""
    points = [(step, row[name]) for step, row in sorted(steps.items()) if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot(table: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    """One PNG with a small chart for each of CURVES; evaluations are dots in the reward's chart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 7.5), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, CURVES, strict=True):
        for name in names:
            x, y = series(table.get("rollout/step", {}), name)
            axis.plot(x, y, linewidth=1.2, label=name.split("/")[-1])
        if names[0] in LOG_SCALE and any(line.get_ydata().size for line in axis.lines):
            axis.set_yscale("log")
        if names == CURVES[0][1]:
            for name in evaluation_names(table):
                x, y = series(table["eval/step"], name)
                axis.plot(x, y, "o-", markersize=5, label=f"held out ({name.removeprefix('eval/')})")
        if len(axis.lines) > 1:
            axis.legend(fontsize=8)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def evaluation_names(table: dict[str, dict[int, dict[str, float]]]) -> list[str]:
    """Metrics `eval/<dataset>`: the mean reward of each evaluation data set."""
    names = {name for row in table.get("eval/step", {}).values() for name in row}
    return sorted(name for name in names if EVAL_REWARD.fullmatch(name))


def print_summary(table: dict[str, dict[int, dict[str, float]]]) -> None:
    """A table of first, best and last value of each curve and evaluation; no best where none is better."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title="run summary")
    for column in ("metric", "first", "best", "last"):
        out.add_column(column, justify="left" if column == "metric" else "right")
    rows = [("eval/step", name, max) for name in evaluation_names(table)]
    rows += [("rollout/step", name, BEST.get(name)) for _, names in CURVES for name in names]
    for key, name, best in rows:
        _, values = series(table.get(key, {}), name)
        if values:
            best_value = f"{best(values):.4g}" if best else ""
            out.add_row(name, f"{values[0]:.4g}", best_value, f"{values[-1]:.4g}")
    Console().print(out)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="file written by --metrics-jsonl")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    args = parser.parse_args(argv)
    if not args.metrics.is_file():
        parser.error(f"{args.metrics} does not exist; a run writes it when started with --metrics-jsonl")
    try:
        table = read_metrics(args.metrics)
    except ValueError as error:
        parser.error(str(error))
    plot(table, args.out)
    print_summary(table)
    print(f"curves: {args.out}")


if __name__ == "__main__":
    main()
