"""What a person reads while a run goes on: plain lines, the panel, and the parts both are made of."""

from types import SimpleNamespace

import pytest

from slime.observability import progress
from slime.observability.progress import BARS, NoProgress, PlainProgress, RichProgress, make_progress, sparkline

STEP = {
    "rollout/raw_reward": 0.8125,
    "rollout/response_len/mean": 3.5,
    "train/loss": -0.01234,
    "train/train_rollout_logprob_abs_diff": 0.0000321,
    "train/grad_norm": 0.75,
    "perf/tokens_per_gpu_per_sec": 1234.4,
    "perf/actor_train_tflops": 412.4,
    "perf/actor_train_mfu": 0.417,
    "perf/generate_time": 1.25,
    "perf/train_time": 2.5,
    "perf/sync_time": 0.31,
    "perf/step_time": 4.1,
}
EVALUATION = {
    "eval/held-out": 0.4375,
    "eval/held-out-truncated_ratio": 0.11,
    "eval/held-out-pass@4": 0.99,
    "eval/held-out/response_len/mean": 3.1,
    "eval/aime": 0.25,
}


@pytest.fixture
def written(capsys, monkeypatch):
    """A function that feeds a display and returns what it wrote to stderr; the terminal is 100 columns wide."""
    monkeypatch.setenv("COLUMNS", "100")

    def write(display, *rows) -> str:
        for row in rows:
            display.write(*row)
        display.close("finished")
        captured = capsys.readouterr()
        assert captured.out == ""  # stdout belongs to the program that calls us
        return captured.err

    return write


def test_plain_line_holds_every_figure_and_phase(written):
    assert written(PlainProgress(120), (4, "rollout/step", STEP)) == (
        "step 5/120: reward 0.812  loss -0.0123  response length 3.5  |logp train - rollout| 3.2e-05  "
        "grad norm 0.750  tokens/s per GPU 1234  TFLOP/s per GPU 412  MFU 41.7%  "
        "generate 1.2s  train 2.5s  sync 0.3s\n"
    )


def test_plain_line_of_a_run_without_rewards_leaves_them_out(written):
    """Supervised training generates nothing; without a known length there is no total."""
    text = written(PlainProgress(None), (0, "rollout/step", {"train/loss": 2.0, "perf/train_time": 3.0}))
    assert text == "step 1: loss 2.0000  train 3.0s\n"


def test_evaluations_are_the_mean_rewards_alone(written):
    """A data set's name may contain "-"; its ratios and pass@k are not rewards."""
    text = written(PlainProgress(9), (3, "eval/step", EVALUATION))
    assert text == "eval after 3 rollouts: held-out 0.438, aime 0.250\n"


def test_rich_panel_shows_every_figure_the_curve_and_the_time_left(written, monkeypatch):
    """Two of ten steps, five seconds apart: 8 x 5 s are left. The bar must not hide the row below it."""
    clock = iter([100.0, 105.0])
    display = RichProgress(10)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    later = STEP | {"rollout/raw_reward": 0.9}
    rows = (0, "eval/step", EVALUATION), (0, "rollout/step", STEP), (1, "rollout/step", later)
    panel = written(display, *rows)
    lines = [" ".join(line.strip("│ \n").split()) for line in panel.splitlines()]
    assert "step 2/10, 0 min 40 s left" in lines[0]
    assert lines[2:-1] == [
        "reward 0.900",
        "loss -0.0123",
        "response length 3.5",
        "|logp train - rollout| 3.2e-05",
        "grad norm 0.750",
        "tokens/s per GPU 1234",
        "TFLOP/s per GPU 412",
        "MFU 41.7%",
        "seconds generate 1.25 train 2.50 sync 0.31",
        "evaluation after 0 rollouts: held-out 0.438, aime 0.250",
        f"reward, last 2 {BARS[0]}{BARS[-1]}",
    ]


def test_rich_display_ends_with_its_panel_on_stderr(written):
    text = written(RichProgress(None), (0, "rollout/step", {"train/loss": 1.5}))
    assert "step 1/?, time left unknown" in text and "1.5000" in text and "loss, last 1" in text


@pytest.mark.parametrize("terminal, kind", [(True, RichProgress), (False, PlainProgress)])
def test_auto_asks_for_a_terminal(monkeypatch, terminal, kind):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: terminal)
    display = make_progress("auto", 3)
    display.close("finished")
    assert type(display) is kind
    assert type(make_progress("none", 3)) is NoProgress


def test_no_progress_writes_nothing(written):
    assert written(NoProgress(3), (0, "rollout/step", STEP)) == ""


def test_sparkline_spans_the_range_and_never_swaps_an_order():
    values = [0.3, 0.1, 0.2, 0.9, 0.55, 0.9]
    line = sparkline(values)
    assert len(line) == len(values)
    assert line[1] == BARS[0] and line[3] == line[5] == BARS[-1]
    for a, x in zip(values, line, strict=True):
        for b, y in zip(values, line, strict=True):
            assert a > b or BARS.index(x) <= BARS.index(y)
    assert sparkline([0.5, 0.5]) == BARS[0] * 2
