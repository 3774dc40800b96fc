"""However a run ends - in order, by an error, by a signal at any moment, killed - none of its processes stays."""

import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.e2e import Launch

pytestmark = pytest.mark.e2e


class Run(Launch):
    """tests.helpers.interruptible_run in a process of its own."""

    def __init__(self, folder: Path, mode: str) -> None:
        super().__init__(
            [sys.executable, "-m", "tests.helpers.interruptible_run", str(folder), mode], folder / "output.txt"
        )

    def wait_for_milestone(self, milestone: str) -> None:
        self.wait_for(f"milestone {milestone}", timeout=120)


def test_a_finished_run_leaves_nothing(tmp_path):
    run = Run(tmp_path, "finish")
    assert run.end(120) == 0, run.tail()
    run.assert_nothing_remains(within=1)


def test_ctrl_c_while_generating(tmp_path):
    run = Run(tmp_path, "hang")
    run.wait_for_milestone("started")
    assert len(run.remaining()) >= 10  # the mark does find what it should
    time.sleep(1.0)
    run.process.send_signal(signal.SIGINT)
    assert run.end(60) == 130
    run.assert_nothing_remains(within=1)
    last = run.text()[run.text().index("stopped by SIGINT") :]
    assert "Traceback" not in last


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_at_a_random_moment_of_the_start(tmp_path, number, code):
    run = Run(tmp_path, "hang")
    run.wait_for_milestone("begun")
    delay = random.uniform(0.2, 15.0)
    time.sleep(delay)
    run.process.send_signal(number)
    assert run.end(60) == code, f"after {delay:.2f} s: {run.tail()}"
    run.assert_nothing_remains(within=1)


def test_a_killed_driver_takes_everything_with_it(tmp_path):
    run = Run(tmp_path, "hang")
    run.wait_for_milestone("started")
    run.process.kill()
    run.end(60)
    run.assert_nothing_remains(within=90)  # Ray's agents look for their head for a minute


def test_an_engine_that_dies_ends_the_run_with_its_last_words(tmp_path):
    run = Run(tmp_path, "crash")
    assert run.end(120) == 1
    run.assert_nothing_remains(within=1)
    block = run.text()[run.text().rindex("error: ") :]
    assert re.match(
        r"error: engine 1 ended with status 0 .* after its start; last lines of its log .*engine 1.log", block
    )
    assert "serving" in block and "generate rollout 0" in block and "Traceback" not in block


def test_an_error_in_a_plug_in_is_one_block(tmp_path):
    run = Run(tmp_path, "error")
    assert run.end(120) == 1
    run.assert_nothing_remains(within=1)
    block = run.text()[run.text().rindex("error: ") :]
    assert block.startswith("error: run.jsonl:17: no label\n") and "Traceback" not in block
