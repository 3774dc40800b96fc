"""Curves and table from a metrics file: what is drawn is what the file says, and a broken row is named."""

import json
import struct
import zlib

import pytest

from tools import plot_metrics
from tools.plot_metrics import evaluation_names, read_metrics, series

LINES = [
    {
        "eval/step": 0,
        "time": 1.0,
        "eval/held-out": 0.25,
        "eval/held-out-truncated_ratio": 0.9,
        "eval/held-out-pass@2": 1,
    },
    {"rollout/step": 0, "time": 2.0, "rollout/raw_reward": 0.25, "train/grad_norm": 3.0, "perf/train_time": 1.0},
    {"rollout/step": 2, "time": 3.0, "rollout/raw_reward": 0.5, "perf/train_time": 9},
    {
        "rollout/step": 1,
        "time": 4.0,
        "perf/train_time": 0.5,
        "rollout/raw_reward": 0.4,
        "train/train_rollout_logprob_abs_diff": 1e-6,
    },
    {"rollout/step": 2, "time": 5.0, "rollout/raw_reward": 0.75, "perf/train_time": 2, "train/grad_norm": None},
    {"eval/step": 3, "time": 6.0, "eval/held-out": 0.875, "eval/held-out-truncated_ratio": 0.1},
]


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_steps_are_ordered_repeated_ones_count_once_and_gaps_stay_out(metrics):
    """Step 2 was trained twice, because the run was resumed from step 1; its second row is the one that counts."""
    table = read_metrics(metrics)
    assert series(table["rollout/step"], "rollout/raw_reward") == ([0, 1, 2], [0.25, 0.4, 0.75])
    assert series(table["rollout/step"], "train/grad_norm") == ([0], [3.0])
    assert series(table["eval/step"], "eval/held-out") == ([0, 3], [0.25, 0.875])
    assert series(table["rollout/step"], "train/entropy_loss") == ([], [])


def test_evaluations_are_data_sets_and_not_what_is_said_about_them(metrics):
    assert evaluation_names(read_metrics(metrics)) == ["eval/held-out"]
    assert evaluation_names({}) == []


@pytest.mark.parametrize("line", ["{", "[1, 2]", '["a/step"]', "7", '{"train/loss": 1.0}', "null", '{"a/step": "x"}'])
def test_a_row_that_is_none_is_named_by_file_and_line(metrics, line):
    with metrics.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"^{metrics}:7: not a metrics row"):
        read_metrics(metrics)


def pixels(png: bytes) -> tuple[int, int, bytes]:
    """Width, height and the decompressed rows of a PNG file."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    data, position = b"", 8
    while position < len(png):
        (size,) = struct.unpack(">I", png[position : position + 4])
        if png[position + 4 : position + 8] == b"IDAT":
            data += png[position + 8 : position + 8 + size]
        position += size + 12
    return width, height, zlib.decompress(data)


def test_command_draws_a_picture_and_prints_a_table(metrics, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "new" / "curves.png"
    plot_metrics.main([str(metrics), "--out", str(out)])
    width, height, drawn = pixels(out.read_bytes())
    assert (width, height) == (1650, 825)
    printed = capsys.readouterr().out
    cells = {line.strip("│ ").split("│")[0].strip(): line for line in printed.splitlines() if "/" in line}
    for name, values in {
        "eval/held-out": ("0.25", "0.875", "0.875"),
        "rollout/raw_reward": ("0.25", "0.75", "0.75"),
        "train/grad_norm": ("3", "", "3"),  # neither a large nor a small one is better
        "perf/train_time": ("1", "0.5", "2"),
    }.items():
        assert tuple(cells[name].strip("│ ").replace(" ", "").split("│")[1:]) == values
    assert "train/entropy_loss" not in printed and str(out) in printed

    metrics.write_text("")
    plot_metrics.main([str(metrics), "--out", str(out)])
    assert pixels(out.read_bytes())[2] != drawn  # an empty file gives empty axes


def test_user_errors_end_the_command_with_a_sentence(metrics, tmp_path, capsys):
    for path, says in ((tmp_path / "no.jsonl", "--metrics-jsonl"), (metrics, f"{metrics}:7: ")):
        if path == metrics:
            path.write_text(path.read_text() + "oops\n")
        with pytest.raises(SystemExit) as stop:
            plot_metrics.main([str(path), "--out", str(tmp_path / "x.png")])
        assert stop.value.code == 2 and says in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
