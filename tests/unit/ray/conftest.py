"""A small private Ray cluster for the tests of this directory, and arguments as the orchestration reads them."""

import pytest

from slime.ray.cluster import connect, disconnect
from tests.helpers.ray_args import make_args


@pytest.fixture(scope="session")
def cluster():
    """Connected to a local cluster of 7 CPU slots and one for the manager."""
    connect(make_args(actor_num_gpus_per_node=4, rollout_num_gpus=3))
    yield
    disconnect()
