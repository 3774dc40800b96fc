"""What the whole suite shares: tests marked `gpu` are skipped on a machine without CUDA."""

from collections.abc import Sequence

import pytest

from slime.utils.accelerator import detect_accelerator


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if detect_accelerator() == "cuda":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
