"""A launch script on a real Ray cluster of one machine, from `ray start` to the end of the last process."""

import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.e2e import ROOT, Launch

pytestmark = pytest.mark.e2e

SCRIPT = """
set -euo pipefail
source {root}/scripts/lib/launch.sh
source {root}/scripts/models/quickstart.sh
RUNTIME_ENV=(SLIME_TEST_VALUE='a "b" $c')
slime_launch {entry} "${{MODEL_ARGS[@]}}" "$@"
"""
DRIVER = """
import json, os, ray, sys
ray.init(address=os.environ["RAY_ADDRESS"], configure_logging=False)
names = ("SLIME_TEST_VALUE", "PYTHONPATH")
there = ray.get(ray.remote(lambda: {name: os.environ.get(name) for name in names}).remote())
print("RESULT", json.dumps([sys.argv[-3:], there]), flush=True)
sys.exit(3 if sys.argv[-1] == "fail" else 0)
"""


def free_port() -> int:
    """A port that nobody listens on, and that the system gives no client: Ray itself opens many connections."""
    ephemeral = range(*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    while True:
        port = random.randrange(20000, 60000)  # Ray's workers have 10002 to 19999
        with socket.socket() as listener:
            if port not in ephemeral and listener.connect_ex(("127.0.0.1", port)) != 0:
                return port


@pytest.mark.parametrize("last, code", [("succeed", 0), ("fail", 1)])
def test_a_launch_on_real_ray(tmp_path: Path, launches: list, last: str, code: int) -> None:
    """The job gets the tokens and every worker the environment, the exit code is the job's, and no process remains."""
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "driver.py").write_text(DRIVER)
    script = folder / "run.sh"
    # the entry is a path below the checkout; this one leads out of it
    up = "/".join([".."] * (len(ROOT.parts) - 1))
    script.write_text(SCRIPT.format(root=ROOT, entry=f"'{up}{folder}/driver.py'"))
    # Ray notes the newest cluster of a node in its directory of temporary files, which other tests must not find.
    # The paths of its sockets are limited to 107 characters, hence not tmp_path.
    temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    launch = Launch(
        ["bash", str(script), "two words", '{"k": "$x"}', last],
        folder / "output.txt",
        {
            "SLIME_PYTHON": sys.executable,
            "SLIME_RUN_DIR": str(folder / "run"),
            "RAY_PORT": str(free_port()),
            "RAY_DASHBOARD_PORT": str(free_port()),
            "NUM_GPUS": "0",
            "SLIME_RAY_START_TIMEOUT": "180",
            "RAY_TMPDIR": str(temporary),
        },
    )
    launches.append(launch)
    assert launch.end(300) == code, launch.tail()
    expected = '[["two words", "{\\"k\\": \\"$x\\"}", "%s"], {"SLIME_TEST_VALUE": "a \\"b\\" $c", "PYTHONPATH": "%s"}]'
    assert f"RESULT {expected % (last, ROOT)}" in launch.text(), launch.tail()
    assert {path.name for path in (folder / "run").iterdir()} == {"head.log", "submit.log"}
    assert not (temporary / "ray/ray_current_cluster").exists()
    launch.assert_nothing_remains(within=5)
    shutil.rmtree(temporary)
