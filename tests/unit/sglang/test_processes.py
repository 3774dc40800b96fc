"""Supervised processes and port reservations: nothing outlives its owner, nobody takes a reserved port."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.backends.sglang_utils.ports import PortInUseError, reserve_free_port, reserve_port
from slime.backends.sglang_utils.server_process import ManagedProcess
from slime.utils.engine_client import EngineError

REPO = Path(__file__).parents[3]

# a command with a child in its own session and a grandchild orphaned to whoever adopts it, all ignoring SIGTERM
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", sleeper], start_new_session=True)
orphan = subprocess.check_output(
    [sys.executable, "-S", "-c",
     "import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]],"
     "start_new_session=True, stdout=subprocess.DEVNULL); print(p.pid)", sleeper])
print("pids", os.getpid(), child.pid, int(orphan), flush=True)
time.sleep(600)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_in(log: Path, deadline: float = 30.0) -> list[int]:
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        lines = [line for line in log.read_text().splitlines() if line.startswith("pids ")] if log.exists() else []
        if lines:
            return [int(pid) for pid in lines[0].split()[1:]]
        time.sleep(0.05)
    raise AssertionError(f"the tree did not start: {log.read_text()}")


def wait_gone(pids: list[int], seconds: float) -> list[int]:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(running, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if running(pid)]


def start_tree(log: Path) -> ManagedProcess:
    return ManagedProcess("tree", [sys.executable, "-S", "-c", TREE], os.environ, log)


def test_stop_ends_the_whole_tree(tmp_path):
    process = start_tree(tmp_path / "log")
    pids = pids_in(tmp_path / "log")
    assert all(map(running, pids)) and process.alive()
    process.stop()
    process.stop()
    assert wait_gone(pids, 1) == [] and not process.alive()


@pytest.mark.parametrize("victim", ["owner", "supervisor_by_sigterm"])
def test_nothing_is_left_when_somebody_above_is_killed(tmp_path, victim):
    """The owner starts the tree from a thread that has ended: no reason to end the tree, the owner's death is one."""
    owner_code = (
        "import os, sys, threading, time; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from slime.backends.sglang_utils.server_process import ManagedProcess\n"
        "def start(): globals().update(p=ManagedProcess('t', [sys.executable, '-S', '-c', sys.argv[3]], os.environ,"
        " Path(sys.argv[2])))\n"
        "t = threading.Thread(target=start); t.start(); t.join(); print(p.pid, flush=True); time.sleep(600)\n"
    )
    log = tmp_path / "log"
    owner = subprocess.Popen(
        [sys.executable, "-c", owner_code, str(REPO), str(log), TREE], stdout=subprocess.PIPE, text=True
    )
    try:
        supervisor = int(owner.stdout.readline())
        pids = pids_in(log)
        time.sleep(0.5)
        assert all(map(running, [*pids, supervisor]))
        if victim == "owner":
            os.kill(owner.pid, signal.SIGKILL)
        else:
            os.kill(supervisor, signal.SIGTERM)
        assert wait_gone([*pids, supervisor], 15) == []
    finally:
        owner.kill()
        owner.wait()


def test_main_command_dies_with_a_killed_supervisor(tmp_path):
    process = start_tree(tmp_path / "log")
    main, *others = pids_in(tmp_path / "log")
    os.kill(process.pid, signal.SIGKILL)
    try:
        assert wait_gone([main], 10) == []
    finally:
        process.stop()
        for pid in others:  # sglang's own processes tie themselves to the main one; these do not
            os.kill(pid, signal.SIGKILL)


def test_early_death_is_reported_with_status_and_log(tmp_path):
    code = "import sys; print('loading'); sys.exit('no such model')"
    process = ManagedProcess("engine 5", [sys.executable, "-c", code], os.environ, tmp_path / "e.log")
    with pytest.raises(EngineError, match=r"(?s)engine 5 ended with status 1 .*e\.log.*no such model"):
        process.wait_until(lambda: False, timeout=30, waiting_for="/health")


def test_silence_is_reported_with_the_log(tmp_path):
    code = "import time; print('thinking', flush=True); time.sleep(600)"
    process = ManagedProcess("engine 6", [sys.executable, "-S", "-c", code], os.environ, tmp_path / "e.log")
    try:
        process.wait_until(lambda: "thinking" in process.log_tail(), 30, "its log")
        with pytest.raises(EngineError, match=r"(?s)engine 6 did not answer /health in 0\.3 s.*thinking"):
            process.wait_until(lambda: False, timeout=0.3, waiting_for="/health")
        process.check_alive()
    finally:
        process.stop()


def test_signal_death_has_a_shell_like_status(tmp_path):
    code = "import os; os.kill(os.getpid(), 9)"
    process = ManagedProcess("e", [sys.executable, "-S", "-c", code], os.environ, tmp_path / "e.log")
    with pytest.raises(EngineError, match="status 137"):
        process.wait_until(lambda: False, timeout=30, waiting_for="/health")


def test_listening_port_is_refused_by_number():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            reserve_port("127.0.0.1", port)


def test_reserved_port_is_not_handed_out_but_can_be_listened_on():
    with reserve_free_port("127.0.0.1", 21000, 21005) as reservation:
        port = reservation.getsockname()[1]
        others = [reserve_free_port("127.0.0.1", 21000, 21005) for _ in range(4)]
        assert len({port, *(other.getsockname()[1] for other in others)}) == 5
        with pytest.raises(PortInUseError, match="none of 5 ports"):
            reserve_free_port("127.0.0.1", 21000, 21005)
        for other in others:
            other.close()
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
