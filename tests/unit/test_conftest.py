"""Tests that need a GPU run where there is one and are skipped, without loading torch for the question, elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys, pytest
from tests import conftest
conftest.detect_accelerator = lambda: {device!r}

class Item:
    def __init__(self, marks):
        self.marks, self.added = marks, []
    def get_closest_marker(self, name):
        return name in self.marks
    def add_marker(self, mark):
        self.added.append(mark.name)

items = [Item(["gpu"]), Item(["e2e"]), Item([])]
conftest.pytest_collection_modifyitems(items)
print([item.added for item in items], "torch" in sys.modules)
"""


@pytest.mark.parametrize("device, skips", [("cpu", [["skip"], [], []]), ("cuda", [[], [], []])])
def test_gpu_tests_are_skipped_without_cuda(device, skips):
    command = [sys.executable, "-c", CODE.format(device=device)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"{skips} False"
