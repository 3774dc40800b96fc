"""How long the parts of one step took, seen from the driver."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Wall time of named phases of the step that begins with this object."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """perf/<phase>_time of each phase and perf/step_time since this object was made, in seconds."""
        times = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        return times | {"perf/step_time": time.perf_counter() - self._started}
