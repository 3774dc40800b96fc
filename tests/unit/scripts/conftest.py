"""A cluster of stand-ins for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_cluster import FakeCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    """A directory whose name has a space, as users' directories may."""
    fake = FakeCluster(tmp_path / "a cluster")
    yield fake
    fake.close()
