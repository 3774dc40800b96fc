"""Exit codes, the last words of a failed run, and signals that come at a bad moment."""

import os
import signal

import pytest
import ray

from slime.backends.sglang_utils.ports import PortInUseError
from slime.ray import driver
from slime.utils.engine_client import EngineError
from tests.helpers.ray_args import make_args


@pytest.fixture
def calls(monkeypatch):
    """The driver without a cluster; records what it does. Handlers are put back."""
    calls = []
    monkeypatch.setattr(driver, "connect", lambda args: calls.append("connect"))
    monkeypatch.setattr(driver, "disconnect", lambda: calls.append("disconnect"))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield calls
    for number, handler in before.items():
        signal.signal(number, handler)


def test_success(calls):
    assert driver.run_driver(lambda args: calls.append("train"), make_args()) == 0
    assert calls == ["connect", "train", "disconnect"]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_run_in_order(calls, capfd, number, code):
    def train(args):
        os.kill(os.getpid(), number)
        calls.append("not reached")

    assert driver.run_driver(train, make_args()) == code
    assert calls == ["connect", "disconnect"]
    assert "Traceback" not in capfd.readouterr().err


def test_signal_while_connecting_waits_until_the_cluster_can_be_ended(calls, monkeypatch):
    def connect(args):
        os.kill(os.getpid(), signal.SIGINT)
        calls.append("connected")

    monkeypatch.setattr(driver, "connect", connect)
    assert driver.run_driver(lambda args: calls.append("train"), make_args()) == 130
    assert calls == ["connected", "disconnect"]


def test_signal_while_disconnecting_does_not_leave_processes_behind(calls, monkeypatch):
    def disconnect():
        os.kill(os.getpid(), signal.SIGINT)
        calls.append("disconnected")

    monkeypatch.setattr(driver, "disconnect", disconnect)
    assert driver.run_driver(lambda args: None, make_args()) == 0
    assert calls == ["connect", "disconnected"]


def test_handlers_survive_a_library_that_replaces_them(calls, monkeypatch):
    """As ray.init would take SIGTERM."""
    monkeypatch.setattr(driver, "connect", lambda args: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    assert driver.run_driver(lambda args: os.kill(os.getpid(), signal.SIGTERM), make_args()) == 143


@pytest.mark.parametrize(
    "error",
    [
        ValueError("run.jsonl:17: no label"),
        EngineError("engine 0 died; last lines: oom"),
        NotImplementedError("sample index=0: rm type 'nonsense' is unknown"),
        PortInUseError("port 3000 on 127.0.0.1 is in use by another process; choose another port"),
    ],
)
def test_an_error_that_explains_itself_is_one_block(calls, capfd, tmp_path, error):
    def train(args):
        raise error

    assert driver.run_driver(train, make_args(log_dir=str(tmp_path / "logs"))) == 1
    assert calls == ["connect", "disconnect"]
    shown = capfd.readouterr().err
    assert f"error: {error}" in shown and "Traceback" not in shown and len(shown.splitlines()) <= 6
    (written,) = (tmp_path / "logs").iterdir()
    assert str(written) in shown and "Traceback" in written.read_text()


def test_an_unexpected_error_shows_its_traceback_then_the_block(calls, capfd):
    assert driver.run_driver(lambda args: {}["missing"], make_args()) == 1
    shown = capfd.readouterr().err
    assert shown.index("Traceback") < shown.index("error: KeyError: 'missing'")


def test_errors_of_remote_calls_read_like_local_ones(cluster, capfd, tmp_path):
    """Two actors deep, as an engine's error comes through the rollout manager; the notes tell who failed at what."""

    @ray.remote(num_cpus=0)
    def engine():
        raise EngineError("engine 3 ended with status 9")

    @ray.remote(num_cpus=0)
    def manager():
        ray.get(engine.remote())

    from slime.ray.utils import wait_for

    with pytest.raises(EngineError) as caught:
        wait_for({"rollout manager": manager.remote()}, "generate rollout 5")
    driver.report(caught.value, str(tmp_path))
    shown = capfd.readouterr().err
    assert "error: engine 3 ended with status 9\n(generate rollout 5: rollout manager failed)\n" in shown
    assert "Traceback" not in shown[shown.index("=====") :]
