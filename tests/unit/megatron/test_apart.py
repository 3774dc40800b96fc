"""Runs the test files that need a process without an unadapted Megatron, which other tests import as it is."""

import runpy
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = [HERE / name for name in runpy.run_path(str(HERE / "conftest.py"))["collect_ignore"]]  # all that is left out


def test_files_that_need_a_process_of_their_own():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, FILES)]
    result = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
