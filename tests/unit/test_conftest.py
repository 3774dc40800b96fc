"""Tests that need a GPU are skipped elsewhere, and those that start whole runs go to one worker.

Torch is not loaded for the question.
"""

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
    nodeid = "tests/unit/test_a.py::test_b[c::d]"
    def __init__(self, marks):
        self.marks, self.added = marks, []
    def get_closest_marker(self, name):
        return name in self.marks
    def add_marker(self, mark):
        self.added.append((mark.name, *mark.args))

items = [Item(["gpu"]), Item(["e2e"]), Item([])]
conftest.pytest_collection_modifyitems(items)
print([item.added for item in items], "torch" in sys.modules)
"""


FILE, RUNS, SKIP = ("xdist_group", "tests/unit/test_a.py"), ("xdist_group", "e2e"), ("skip",)


@pytest.mark.parametrize(
    "device, marks", [("cpu", [[FILE, SKIP], [RUNS], [FILE]]), ("cuda", [[FILE], [RUNS], [FILE]])]
)
def test_marks(device, marks):
    command = [sys.executable, "-c", CODE.format(device=device)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"{marks} False"
