"""Server processes that never outlive their owner, and one SGLang server as such a process.

Knows how to start, watch and stop; what to start comes from `server_args`.
"""

import logging
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.ports import reserve_free_port, reserve_port
from slime.backends.sglang_utils.server_args import build_server_args, server_env, to_command_line
from slime.utils.engine_client import EngineClient, EngineError

logger = logging.getLogger(__name__)

SUPERVISOR = Path(__file__).parent / "child.py"
SERVER_MAIN = Path(__file__).parent / "server_main.py"
STOP_GRACE = 2.0


class ManagedProcess:
    """A command in its own session, with its own log file, under a supervisor that ends its whole process tree when
    this object's process is gone (killed included) or `stop` is called."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        """name: as it should read in errors, for instance "SGLang engine 3"."""
        self.name = name
        self.command = list(command)
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        lifeline, self._lifeline = os.pipe()
        supervisor = [sys.executable, "-I", "-S", str(SUPERVISOR), str(lifeline), str(STOP_GRACE)]
        with open(self.log_path, "ab") as log:
            log.write(f"$ {' '.join(self.command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [*supervisor, *self.command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        os.close(lifeline)
        logger.info("started %s (pid %d), log: %s", name, self.pid, self.log_path)

    @property
    def pid(self) -> int:
        """Process id of the supervisor, the ancestor of everything the command started."""
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log file (at most 64 KiB)."""
        with open(self.log_path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 65536))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def check_alive(self) -> None:
        """EngineError with the exit status and the end of the log if the command has ended."""
        status = self._process.poll()
        if status is not None:
            seconds = time.monotonic() - self._started
            raise EngineError(f"{self.name} ended with status {status} {seconds:.0f} s after its start; {self._log()}")

    def wait_until(self, ready: Callable[[], bool], timeout: float, waiting_for: str, interval: float = 0.2) -> None:
        """Polls `ready`. EngineError when the command ends first or `timeout` seconds pass."""
        deadline = time.monotonic() + timeout
        while True:
            self.check_alive()
            if ready():
                return
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} did not answer {waiting_for} in {timeout:g} s; {self._log()}")
            time.sleep(interval)

    def stop(self, timeout: float = 15.0) -> None:
        """Ends the process tree: SIGTERM, SIGKILL after a grace period. May be called twice."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"{self.name} (pid {self.pid}) is still there {timeout:g} s after its stop") from error

    def _log(self) -> str:
        return f"last lines of its log {self.log_path}:\n{self.log_tail()}"


class SGLangServer(ManagedProcess):
    """The SGLang server of one engine (one node of it). It starts in tens of seconds: construct, then `wait_ready`."""

    def __init__(
        self,
        args: Namespace,
        *,
        rank: int,
        log_dir: Path | str,
        environ: Mapping[str, str],
        host: str = "127.0.0.1",
        port: int | None = None,
        nccl_port: int | None = None,
        dist_init_addr: str | None = None,
        nnodes: int = 1,
        node_rank: int = 0,
        base_gpu_id: int = 0,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """environ: environment to start from, normally os.environ. port: None picks a free one.

        PortInUseError before anything is started if the port is taken.
        """
        self._reservation = reserve_free_port(host) if port is None else reserve_port(host, port)
        self.host, self.port, self.node_rank = host, self._reservation.getsockname()[1], node_rank
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self.fields = build_server_args(
            args,
            rank=rank,
            host=host,
            port=self.port,
            nccl_port=nccl_port,
            dist_init_addr=dist_init_addr,
            nnodes=nnodes,
            node_rank=node_rank,
            base_gpu_id=base_gpu_id,
            overrides=overrides,
        )
        self.client = EngineClient(self.url, api_key=self.fields.get("api_key"))
        super().__init__(
            name=f"SGLang engine {rank} ({self.url})",
            # -P: modules beside the script must not shadow those of others
            command=[sys.executable, "-P", str(SERVER_MAIN), *to_command_line(self.fields)],
            env=server_env(args, environ, tp_size=self.fields["tp_size"]),
            log_path=Path(log_dir) / f"sglang_engine_{rank}_node_{node_rank}.log",
        )

    def wait_ready(self, timeout: float) -> None:
        """Returns when the server has generated a token; further nodes of an engine have no server to ask."""
        if self.node_rank == 0:
            self.wait_until(lambda: self._answers("/health"), timeout, "/health")
            self.wait_until(lambda: self._answers("/health_generate"), timeout, "/health_generate")
            self.client.freeze_gc()
        self.check_alive()
        self._reservation.close()
        logger.info("%s is ready after %.1f s", self.name, time.monotonic() - self._started)

    def stop(self, timeout: float = 15.0) -> None:
        super().stop(timeout)
        self._reservation.close()

    def _answers(self, endpoint: str) -> bool:
        try:
            self.client.health(timeout=30, endpoint=endpoint)
        except EngineError:
            return False
        return True
