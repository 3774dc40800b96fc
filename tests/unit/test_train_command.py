"""train.py answers help and mistakes in the arguments before it imports what takes long."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The command line in a process in which importing ray or torch fails.
CODE = """
import runpy, sys
sys.modules["ray"] = sys.modules["torch"] = None
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    "arguments, code, stream, says",
    [
        (["--help"], 0, "stdout", "--rollout-batch-size"),
        (["--no-such-flag"], 2, "stderr", "--no-such-flag: unknown flag"),
    ],
)
def test_answers_without_ray(arguments, code, stream, says):
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert says in getattr(done, stream)
