"""Runs one command and takes its whole process tree down when the command's owner goes away.

Started as a script by `server_process.ManagedProcess`; standard library only, because it must be up in milliseconds.

    python child.py LIFELINE_FD GRACE_SECONDS COMMAND...

LIFELINE_FD is the reading end of a pipe whose writing end only the owner holds: end of file means that the owner is
gone, however it died and whichever thread started this. Orphans of the command are adopted (child subreaper), so a
grandchild cannot slip away. Linux only.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Exit status of the command, 128 + signal number if a signal ended it or it was told to stop."""
    lifeline, grace, command = int(argv[0]), float(argv[1]), argv[2:]
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)

    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    while True:
        readable, _, _ = select.select([lifeline, wake_read], [], [])
        if lifeline in readable:
            status = 128 + signal.SIGHUP
            break
        numbers = os.read(wake_read, 4096)
        status = _reap(process.pid)
        if status is not None:
            break
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            status = 128 + signal.SIGTERM
            break
    _end_descendants(grace)
    return status


def _die_with_parent() -> None:
    """Should this supervisor itself be killed, the kernel kills the command (which takes its own children along)."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _reap(main_pid: int) -> int | None:
    """Collects ended children and adopted orphans; the exit status of `main_pid` if it is among them."""
    result = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return result
        if pid == 0:
            return result
        if pid == main_pid:
            code = os.waitstatus_to_exitcode(status)
            result = code if code >= 0 else 128 - code


def _end_descendants(grace: float) -> None:
    """SIGTERM to every descendant, SIGKILL after `grace` seconds to those still there."""
    for pid in _descendants():
        _send(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while _descendants() and time.monotonic() < deadline:
        _reap(-1)
        time.sleep(0.05)
    while remaining := _descendants():
        for pid in remaining:
            _send(pid, signal.SIGKILL)
        _reap(-1)
        time.sleep(0.02)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended by itself in between


def _descendants() -> list[int]:
    """Every living process below this one."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended while we were looking
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry))
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
