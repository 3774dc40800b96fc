"""Stand-ins for `ray`, `ssh`, `nvidia-smi` and `getent`, to watch what a launch script does without a cluster.

Every call is a line of JSON in `calls`. `ray start --block` stays until it gets SIGTERM, like the real one; `ssh HOST
bash -s` runs the text it is given, here, as host HOST; a job is as the files `job-*` say.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASH = "/bin/bash"

RECORD = """
import json, os, sys, time
from pathlib import Path
here = Path(__file__).resolve().parent
seen = {name: os.environ.get(name) for name in (
    "FAKE_HOST", "no_proxy", "NO_PROXY", "http_proxy", "HTTPS_PROXY", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH")}
def record(*words):
    with open(here / "calls", "a") as file:
        file.write(json.dumps({"argv": [Path(__file__).name, *words], "env": seen, "pid": os.getpid()}) + "\\n")
def setting(name):
    return (here / name).read_text().strip() if (here / name).exists() else ""
record(*sys.argv[1:])
"""

RAY = """
import signal
words = sys.argv[1:]
host = os.environ.get("FAKE_HOST", "head")
if words[0] == "start":
    if host in setting("ray-fails-on").split():
        sys.exit("cannot start: port 6379 is taken")
    def end(*_):
        record("ended", host)
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    if host not in setting("ray-hangs-on").split():
        print("Ray runtime started.", flush=True)
        note = Path(os.environ["RAY_TMPDIR"], "ray/ray_current_cluster")
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text("10.0.0.1:6379")
        print("This command will now block forever until terminated by a signal.", flush=True)
    time.sleep(120)
name = words[words.index("--submission-id") + 1] if "--submission-id" in words else words[-1]
state = here / "job-state"
if words[1] == "submit":
    time.sleep(float(setting("submission-takes") or 0))
    for error in setting("submission-fails").splitlines():
        rest = setting("submission-fails").splitlines()[1:]
        (here / "submission-fails").write_text("\\n".join(rest))
        sys.exit(error)
    state.write_text("running")
if words[1] == "logs":
    print("output of the job", flush=True)
    if setting("log-is-lost"):
        (here / "log-is-lost").unlink()
        sys.exit("connection closed")
    for _ in range(600):
        if setting("job-ends"):
            state.write_text(setting("job-ends"))
        if setting("job-state") != "running":
            break
        time.sleep(0.1)
if words[1] == "stop":
    state.write_text("stopped")
if words[1] == "status":
    if setting("silent-answers") not in ("", "0"):
        (here / "silent-answers").write_text(str(int(setting("silent-answers")) - 1))
        sys.exit("no answer")
    match setting("job-state"):
        case "":
            sys.exit("no cluster answers")
        case "running":
            print(f"Status for job '{name}': RUNNING")
        case "stopped":
            print(f"Job '{name}' was stopped")
        case ended:
            print(f"Job '{name}' {ended}")
"""

SSH = """
import subprocess
host = sys.argv[sys.argv.index("bash") - 1]
if host in setting("ssh-fails-on").split():
    sys.exit(255)
environment = {**os.environ, "FAKE_HOST": host, "http_proxy": "http://proxy-of-the-node:3128"}
for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "no_proxy", "NO_PROXY"):
    environment.pop(name, None)  # ssh carries no variables over
sys.exit(subprocess.run(["bash", "-s"], env=environment, stdin=sys.stdin).returncode)
"""

PYTHON = """
print(json.dumps(sys.argv[1:]))
"""

NVIDIA_SMI = """
print(setting("topology"))
"""

GETENT = """
table = {"node-0": "10.0.0.1", "node-1": "10.0.0.2", "node-2": "10.0.0.3"}
if sys.argv[2] in table:
    print(table[sys.argv[2]], "STREAM", sys.argv[2])
else:
    sys.exit(2)
"""


@dataclass
class FakeCluster:
    """directory: holds `bin/` with the stand-ins, the files that tell them what to do, and `calls`."""

    directory: Path
    root: Path = ROOT
    processes: list[subprocess.Popen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bin.mkdir(parents=True)
        programs = {"ray": RAY, "ssh": SSH, "python3": PYTHON, "nvidia-smi": NVIDIA_SMI, "getent": GETENT}
        for name, body in programs.items():
            # -I -S: the start of each stand-in takes 10 ms
            (self.bin / name).write_text(f"#!{sys.executable} -IS\n{RECORD}{body}")
            (self.bin / name).chmod(0o755)

    @property
    def bin(self) -> Path:
        return self.directory / "bin"

    @property
    def note(self) -> Path:
        """Where Ray notes the newest cluster of the node."""
        return self.directory / "ray/ray_current_cluster"

    @property
    def run_dir(self) -> Path:
        """What the launcher calls the directory of the run."""
        return self.directory / "run"

    def set(self, name: str, text: str) -> None:
        """Tell the stand-ins: job-ends, ray-fails-on, ray-hangs-on, ssh-fails-on, topology, log-is-lost,
        silent-answers (how many), submission-takes (seconds), submission-fails (an error a line)."""
        (self.bin / name).write_text(text)

    def environment(self, **variables: str) -> dict[str, str]:
        """A launcher's environment: no variable of this process but those that a shell needs."""
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.directory),
            "SLIME_PYTHON": str(self.bin / "python3"),
            "SLIME_RUN_DIR": str(self.run_dir),
            "RAY_TMPDIR": str(self.directory),
            "SLIME_RAY_START_TIMEOUT": "20",
            "SLIME_RETRY_SECONDS": "0.1",
        } | variables

    def start(self, script: Path | str, *words: str, **variables: str) -> subprocess.Popen:
        """Run a script of the repository; its output is read with `communicate`."""
        process = subprocess.Popen(
            [BASH, str(self.root / script), *words],
            env=self.environment(**variables),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(self, script: Path | str, *words: str, **variables: str) -> subprocess.CompletedProcess:
        """Run a script to its end, a minute at most."""
        process = self.start(script, *words, **variables)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def call(self, function: str, *words: str, **variables: str) -> str:
        """The output of one function of scripts/lib. Raises CalledProcessError when it fails."""
        text = f'set -euo pipefail; source "{self.root}/scripts/lib/launch.sh"; {function} "$@"'
        command = [BASH, "-c", text, "bash", *words]
        environment = self.environment(**variables)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def calls(self, *beginning: str) -> list[dict]:
        """What was called with these first words, in order: argv (without them), env and pid."""
        file = self.bin / "calls"
        written = file.read_text().split("\n")[:-1] if file.exists() else []  # the last may be half written
        lines = [json.loads(line) for line in written]
        size = len(beginning)
        return [{**line, "argv": line["argv"][size:]} for line in lines if tuple(line["argv"][:size]) == beginning]

    def order(self) -> list[str]:
        """The first two words of every call that matters for the order of a launch."""
        return [" ".join(call["argv"][:2]) for call in self.calls() if call["argv"][0] == "ray"]

    def wait_for_call(self, *beginning: str) -> None:
        """Returns once a call with these words has been made; TimeoutError after 20 s."""
        deadline = time.monotonic() + 20
        while not self.calls(*beginning):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{beginning} was not called: {self.order()}")
            time.sleep(0.05)

    def alive(self) -> list[int]:
        """Process ids of the `ray start` that still run."""
        return [call["pid"] for call in self.calls("ray", "start") if _is_alive(call["pid"])]

    def close(self) -> None:
        """End what a failed test has left."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)


def flags_of(tokens: Sequence[str]) -> dict[str, list[str]]:
    """Flag -> its values; of a flag given twice the last counts, as on the command line."""
    flags: dict[str, list[str]] = {}
    for token in tokens:
        if token.startswith("--"):
            flags.pop(token, None)
            flags[token] = []
        else:
            flags[next(reversed(flags))].append(token)
    return flags


def env_vars_of(submission: Mapping) -> dict[str, str]:
    """The environment in a recorded `ray job submit`."""
    argv = submission["argv"]
    return json.loads(argv[argv.index("--runtime-env-json") + 1])["env_vars"]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
