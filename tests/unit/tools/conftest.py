"""What the quickstart trains on, made once for all tests of the tools."""

import pytest

from tools import make_quickstart


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory):
    """The directory that `tools/make_quickstart.py --seed 1234` writes."""
    directory = tmp_path_factory.mktemp("quickstart")
    make_quickstart.main(["--out", str(directory), "--seed", "1234"])
    return directory
