"""The sglang-router process in front of the engines, and the calls that add and remove engines at a running router."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.ports import reserve_free_port, reserve_port
from slime.backends.sglang_utils.server_process import ManagedProcess
from slime.backends.sglang_utils.upstream_fields import NO_DEFAULT, check_known, router_fields
from slime.utils.engine_client import EngineError, http_request

ROUTER_MAIN = Path(__file__).parent / "router_main.py"
ROUTER_PORTS = (3000, 4000)
PROMETHEUS_PORTS = (4000, 5000)


class RouterClient:
    """Adds, lists and removes workers of one router, also of one that somebody else started."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def workers(self) -> list[dict[str, Any]]:
        """One dict a worker: id, url, is_healthy, worker_type, load and more."""
        return json.loads(self._call("GET", "/workers"))["workers"]

    def answers(self) -> bool:
        """Whether the router accepts requests, workers or not."""
        try:
            return http_request("GET", f"{self.url}/liveness", timeout=5, headers=self._headers)[0] == 200
        except EngineError:
            return False

    def add_worker(
        self, url: str, worker_type: str = "regular", bootstrap_port: int | None = None, timeout: float = 60.0
    ) -> None:
        """Registers an engine that is up; returns when the router lists it as healthy."""
        body = {"url": url, "worker_type": worker_type}
        if bootstrap_port is not None:
            body["bootstrap_port"] = bootstrap_port
        self._call("POST", "/workers", body)
        self._wait(
            lambda: any(worker["is_healthy"] for worker in self._listed(url)), timeout, f"list {url} as healthy"
        )
        # the worker is listed a moment before requests are routed to it
        self._wait(self._ready, timeout, "report /readiness")

    def remove_worker(self, url: str, timeout: float = 60.0) -> None:
        """Takes an engine out, returns when it is not listed any more. A url that is not listed is fine."""
        for worker in self._listed(url):
            self._call("DELETE", f"/workers/{worker['id']}")
        self._wait(lambda: not self._listed(url), timeout, f"forget {url}")

    def _listed(self, url: str) -> list[dict[str, Any]]:
        return [worker for worker in self.workers() if worker["url"].rstrip("/") == url.rstrip("/")]

    def _ready(self) -> bool:
        return http_request("GET", f"{self.url}/readiness", timeout=5, headers=self._headers)[0] == 200

    def _wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                known = ", ".join(f"{w['url']} healthy={w['is_healthy']}" for w in self.workers()) or "none"
                raise EngineError(f"router {self.url} did not {what} in {timeout:g} s; workers: {known}")
            time.sleep(0.05)

    def _call(self, method: str, endpoint: str, body: Mapping[str, Any] | None = None) -> str:
        status, answer = http_request(method, self.url + endpoint, body, timeout=30, headers=self._headers)
        if status not in (200, 202):
            raise EngineError(f"router {method} {self.url}{endpoint} answered HTTP {status}: {answer[:2000]}")
        return answer


class Router(ManagedProcess):
    """`sglang-router` as a process of ours. Construct, `wait_ready`, then `client.add_worker` for each engine."""

    def __init__(
        self,
        args: Namespace,
        *,
        log_dir: Path | str,
        environ: Mapping[str, str],
        host: str = "127.0.0.1",
        port: int | None = None,
        name: str = "default",
    ) -> None:
        """port: None picks a free one. name: of the model behind it. PortInUseError if the port is taken."""
        self._reservations = [
            reserve_free_port(host, *ROUTER_PORTS) if port is None else reserve_port(host, port),
            reserve_free_port(host, *PROMETHEUS_PORTS),
        ]
        self.host = host
        self.port, prometheus_port = (reservation.getsockname()[1] for reservation in self._reservations)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self.fields = build_router_args(args, host=host, port=self.port, prometheus_port=prometheus_port)
        self.client = RouterClient(self.url, api_key=self.fields.get("api_key"))
        super().__init__(
            name=f"sglang-router {name} ({self.url})",
            command=[sys.executable, str(ROUTER_MAIN), *router_command_line(self.fields)],
            env=router_env(environ),
            log_path=Path(log_dir) / f"sglang_router_{name}.log",
        )

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns when the router accepts requests; it does so without workers."""
        self.wait_until(self.client.answers, timeout, "/liveness", interval=0.1)
        self._release()

    def stop(self, timeout: float = 15.0) -> None:
        super().stop(timeout)
        self._release()

    def _release(self) -> None:
        for reservation in self._reservations:
            reservation.close()


def build_router_args(args: Namespace, *, host: str, port: int, prometheus_port: int) -> dict[str, Any]:
    """RouterArgs fields; the user's `--router-*` flags win over the defaults here. ValueError for an unknown field.

    A slow training engine is not a broken one: neither circuit breaker nor health checks may take it out of service.
    """
    check_known(args.router_overrides, router_fields(), "RouterArgs")
    defaults = {
        "host": host,
        "port": port,
        "prometheus_host": host,
        "prometheus_port": prometheus_port,
        "request_timeout_secs": args.sglang_router_request_timeout_secs,
        "disable_circuit_breaker": True,
        "disable_health_check": True,
        "log_level": "warn",
    }
    return {name: value for name, value in defaults.items() if name in router_fields()} | dict(args.router_overrides)


def router_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, less what keeps Python from storing its byte code."""
    return {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def router_command_line(fields: Mapping[str, Any]) -> list[str]:
    """`--flag value` tokens for `python -m sglang_router.launch_router`; defaults are left out."""
    known = router_fields()
    check_known(fields, known, "RouterArgs")
    return [token for name, value in fields.items() for token in _tokens(name, known[name].default, value)]


def _tokens(name: str, default: Any, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None or (default is not NO_DEFAULT and type(value) is type(default) and value == default):
        return []
    if value is True:
        return [flag]
    if value is False:
        raise ValueError(f"RouterArgs.{name}: the router's flag {flag} cannot express False")
    if isinstance(value, Mapping):
        return [flag, *(f"{key}={entry}" for key, entry in value.items())]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)] if value else []
    return [flag, str(value)]
