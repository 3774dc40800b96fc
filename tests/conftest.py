"""What the whole suite shares: its options, and that tests marked `gpu` are skipped on a machine without CUDA."""

from collections.abc import Sequence

import pytest

from slime.utils.accelerator import detect_accelerator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-rank", action="store_true", help="build every rank of the full-size layouts (2 minutes)")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if detect_accelerator() == "cuda":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
