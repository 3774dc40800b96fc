"""However a run ends - in order, by an error, by a signal at any moment, killed - none of its processes stays."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLIME_TEST_RUN"

pytestmark = pytest.mark.e2e


class Run:
    """A run in a process of its own. Everything it starts inherits a mark in its environment, by which it is found."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.mark = f"{MARK}={os.getpid()}-{random.randrange(10**9)}"
        self.output = folder / "output.txt"
        name, _, value = self.mark.partition("=")
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.interruptible_run", str(folder), mode],
                cwd=ROOT,
                env={**os.environ, name: value},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, milestone: str, timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while f"milestone {milestone}" not in self.text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.05)

    def end(self, timeout: float = 60.0) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the run did not end in {timeout:g} s:\n{self.text()[-3000:]}") from None

    def remaining(self) -> dict[int, str]:
        """Processes with the mark, by id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
            except OSError:
                continue  # it ended, or is not ours
        return found

    def assert_nothing_remains(self, within: float) -> None:
        deadline = time.monotonic() + within
        while (left := self.remaining()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"{left}\n{self.text()[-3000:]}"


def test_a_finished_run_leaves_nothing(tmp_path):
    run = Run(tmp_path, "finish")
    assert run.end(120) == 0, run.text()[-3000:]
    run.assert_nothing_remains(within=1)


def test_ctrl_c_while_generating(tmp_path):
    run = Run(tmp_path, "hang")
    run.wait_for("started")
    assert len(run.remaining()) >= 10  # the mark does find what it should
    time.sleep(1.0)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    run.assert_nothing_remains(within=1)
    last = run.text()[run.text().index("stopped by SIGINT") :]
    assert "Traceback" not in last


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_at_a_random_moment_of_the_start(tmp_path, number, code):
    run = Run(tmp_path, "hang")
    run.wait_for("begun")
    delay = random.uniform(0.2, 15.0)
    time.sleep(delay)
    run.process.send_signal(number)
    assert run.end() == code, f"after {delay:.2f} s: {run.text()[-3000:]}"
    run.assert_nothing_remains(within=1)


def test_a_killed_driver_takes_everything_with_it(tmp_path):
    run = Run(tmp_path, "hang")
    run.wait_for("started")
    run.process.kill()
    run.end()
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
