"""Runs a training function from start to exit code: the cluster, the signals, the error a person reads, the clean end.

Knows nothing of training.
"""

import logging
import os
import signal
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import ray

from slime.ray.cluster import connect, disconnect
from slime.utils.engine_client import EngineError
from slime.utils.http_utils import HttpError

logger = logging.getLogger(__name__)

# Raised with a message that tells a person what to do; the traceback adds nothing for them and goes to a file.
EXPLAINED = (
    ValueError,
    ImportError,
    FileNotFoundError,
    NotImplementedError,  # something known that this version does not do, such as a reward type
    FloatingPointError,  # a loss or gradient that is no number, with its step and samples
    ConnectionError,
    TimeoutError,
    EngineError,
    HttpError,
)
RULE = "=" * 80


class Signals:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt in the main thread, now or, inside `held`, at its end.

    received: the last of them. The exception does not say: Ray replaces it by one of its own.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._held = False
        self.install()

    def install(self) -> None:
        """Takes the handlers, again after a library may have replaced them."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    @contextmanager
    def held(self, forget: bool = False) -> Iterator[None]:
        """Nothing is raised inside. Afterwards what came meanwhile is raised, unless `forget`."""
        before, self._held = self.received, True
        try:
            yield
        finally:
            self.install()
            self._held = False
        if self.received is not before and not forget:
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        print("stopping ...", file=sys.stderr, flush=True)
        if not self._held:
            raise KeyboardInterrupt


def run_driver(train: Callable[[Namespace], None], args: Namespace) -> int:
    """Runs train(args) on a Ray cluster. Exit code: 0, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM.

    Whatever happens, no process that was started on this machine is left when this returns.
    """
    signals = Signals()
    try:
        try:
            with signals.held():  # half a cluster could not be ended
                connect(args)
            train(args)
        finally:
            with signals.held(forget=True):
                disconnect()
    except KeyboardInterrupt:
        number = signals.received or signal.SIGINT
        name = signal.Signals(number).name
        print(f"stopped by {name}; everything this run started has ended", file=sys.stderr, flush=True)
        return 128 + number
    except Exception as error:
        if signals.received is not None:  # what breaks while a signal is being obeyed is not the story
            logger.info("error while stopping", exc_info=error)
            return 128 + signals.received
        report(error, args.log_dir)
        return 1
    return 0


def root_cause(error: BaseException) -> BaseException:
    """The exception that a remote call raised, out of the wrappers Ray puts around it."""
    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def report(error: Exception, log_dir: str | None) -> None:
    """Tells on stderr what went wrong, in one block; the traceback of an error that explains itself goes to a file."""
    cause = root_cause(error)
    text = "".join(traceback.format_exception(error))
    if isinstance(cause, EXPLAINED):
        where = f"traceback: {_write_traceback(text, log_dir)}"
    else:
        print(text, file=sys.stderr)
        where = "this is not a mistake in the command line: the traceback is above"
    message = str(cause) if isinstance(cause, EXPLAINED) else f"{type(cause).__name__}: {cause}"
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    lines = [RULE, f"error: {message}", *notes, where, RULE]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _write_traceback(text: str, log_dir: str | None) -> Path:
    folder = Path(log_dir or tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"slime-error-{os.getpid()}.txt"
    path.write_text(text)
    return path
