"""Runs of the real command line, as a user starts them: wait for their output, signal them, find what they leave."""

import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLIME_TEST_RUN"


class Launch:
    """A command in a session of its own. Everything it starts inherits a mark in its environment, to be found by."""

    def __init__(self, command: Sequence[str], output: Path, env: Mapping[str, str] | None = None) -> None:
        """output: file for stdout and stderr."""
        output.parent.mkdir(parents=True, exist_ok=True)
        mark = f"{os.getpid()}-{random.randrange(10**9)}"
        self.output = output
        self._mark = f"{MARK}={mark}"
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        """What was printed so far."""
        return self.output.read_text(errors="replace")

    def tail(self) -> str:
        """The end of it, for a failed assertion."""
        return f"{self.output}:\n{self.text()[-4000:]}"

    def error(self) -> str:
        """The block that ends a failed run."""
        text = self.text()
        assert "error: " in text, self.tail()
        return text[text.rindex("error: ") :]

    def wait_for(self, pattern: str, timeout: float = 180.0) -> None:
        """Returns when `pattern` was printed; AssertionError if the command ends or the time passes before."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.text()):
            assert self.process.poll() is None and time.monotonic() < deadline, f"no {pattern!r} in {self.tail()}"
            time.sleep(0.05)

    def end(self, timeout: float = 180.0) -> int:
        """Exit code. After `timeout` seconds everything is killed, and an AssertionError shows what was printed."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_everything()
            raise AssertionError(f"no end after {timeout:g} s: {self.tail()}") from None

    def press_ctrl_c(self) -> None:
        """SIGINT for the whole process group, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def remaining(self) -> dict[int, str]:
        """Command line of each process that has the mark, by id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
            except OSError:
                continue  # it ended, or is not ours
        return found

    def kill_everything(self) -> dict[int, str]:
        """Kills what remains and returns it."""
        left = self.remaining()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended just now
        self.process.poll()
        return left

    def assert_nothing_remains(self, within: float = 1.0) -> None:
        """AssertionError, after killing them, if processes of the run are there `within` seconds from now."""
        deadline = time.monotonic() + within
        while self.remaining() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = self.kill_everything()
        assert not left, f"{left}\n{self.tail()}"


class Train(Launch):
    """`python train.py ARGUMENTS`."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        super().__init__([sys.executable, "train.py", *arguments], output)

    def succeed(self, timeout: float = 240.0) -> "Train":
        """Waits for the good end: exit code 0, no process left."""
        assert self.end(timeout) == 0, self.tail()
        self.assert_nothing_remains()
        return self

    def fail(self, code: int = 1, timeout: float = 120.0) -> str:
        """Waits for the bad end: that exit code, no process left. Returns the error block, free of tracebacks."""
        assert self.end(timeout) == code, self.tail()
        self.assert_nothing_remains()
        block = self.error()
        assert "Traceback" not in block, self.tail()
        return block


@dataclass(frozen=True)
class Quickstart:
    """A finished run of scripts/run-quickstart.sh. sft, grpo: the arguments that it gave to train.py."""

    folder: Path
    launch: Launch
    sft: list[str]
    grpo: list[str]

    @property
    def dump(self) -> str:
        """Template of the dumped rollouts."""
        return str(self.folder.parent / "dump" / "{rollout_id}.pt")


def run_quickstart(folder: Path, num_sft: int, num_rollout: int) -> Quickstart:
    """The script from beginning to end, writing to `folder`/quickstart, and dumping its rollouts."""
    out, trace = folder / "quickstart", folder / "trace.txt"
    dump = str(folder / "dump" / "{rollout_id}.pt")
    env = {"OUT": str(out), "NUM_SFT": str(num_sft), "NUM_ROLLOUT": str(num_rollout)}
    script = f"exec 9>{shlex.quote(str(trace))}; BASH_XTRACEFD=9; set -x; . scripts/run-quickstart.sh"
    command = ["bash", "-c", script, "scripts/run-quickstart.sh", "--save-debug-rollout-data", dump]
    launch = Launch(command, folder / "output.txt", env)
    try:
        assert launch.end(400) == 0, launch.tail()
    finally:
        launch.kill_everything()
    runs = [shlex.split(line) for line in trace.read_text().splitlines() if " train.py " in line]
    sft, grpo = (words[words.index("train.py") + 1 :] for words in runs)
    return Quickstart(out, launch, sft, grpo)


def without(arguments: Sequence[str], *flags: str) -> list[str]:
    """The arguments less these flags and the values behind them."""
    kept, dropping = [], False
    for word in arguments:
        if word.startswith("--"):
            dropping = word in flags
        if not dropping:
            kept.append(word)
    return kept


def read_rows(path: Path, key: str = "rollout/step") -> dict[int, dict[str, Any]]:
    """{step: metrics} of a --metrics-jsonl file. AssertionError if a step is there twice or a value is not finite."""
    steps = {}
    for row in map(json.loads, path.read_text().splitlines()):
        if key in row:
            assert row[key] not in steps, f"{path}: {key} {row[key]} is there twice"
            assert all(value is not None and math.isfinite(value) for value in row.values()), row
            steps[row[key]] = row
    return steps


def numbers(row: Mapping[str, float], *families: str) -> dict[str, float]:
    """The metrics of these families ("train", "rollout"): everything that does not depend on the clock."""
    return {name: value for name, value in row.items() if name.split("/")[0] in families}


def assert_whole_checkpoint(save: Path, rollout_id: int) -> None:
    """The latest checkpoint is the one after this rollout, complete; nothing half-written lies beside it."""
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(rollout_id)
    assert {file.name for file in (save / f"iter_{rollout_id:07d}").iterdir()} >= {".metadata", "__0_0.distcp"}
    assert (save / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt").is_file()
    assert_nothing_half_written(save)


def assert_nothing_half_written(save: Path) -> None:
    """Every checkpoint below `save` can be used."""
    if not save.exists():
        return
    names = {file.name for file in save.rglob("*")}
    assert not [name for name in names if name.endswith(".tmp") or ".tmp-" in name], names
    for folder in save.glob("iter_*"):
        assert (folder / ".metadata").is_file(), sorted(folder.iterdir())
