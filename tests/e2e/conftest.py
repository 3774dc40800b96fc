"""One run of the quickstart, shortened, whose results many tests look at."""

from collections.abc import Iterator

import pytest

from tests.helpers.e2e import Quickstart, run_quickstart


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """160 SFT steps in eight rollouts and three GRPO rollouts, which are dumped."""
    return run_quickstart(tmp_path_factory.mktemp("quickstart"), num_sft=160, num_rollout=3)


@pytest.fixture
def launches() -> Iterator[list]:
    """Append what you launch: it is dead after the test, whatever happens."""
    started: list = []
    yield started
    for launch in started:
        launch.kill_everything()
