"""What the whole suite shares: its options, and that tests marked `gpu` are skipped on a machine without CUDA."""

from collections.abc import Sequence

import pytest

from slime.utils.accelerator import detect_accelerator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-rank", action="store_true", help="build every rank of the full-size layouts (2 minutes)")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Two workers (`-n 2 --dist loadgroup`) share the files; one of them does all that starts whole runs, in turn."""
    for item in items:
        group = "e2e" if item.get_closest_marker("e2e") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    if detect_accelerator() == "cuda":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
