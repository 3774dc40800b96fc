"""The configurations of tests/data/hf_configs, and the scripts of scripts/models as real bash reads them."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {file.stem: file for file in sorted((ROOT / "tests/data/hf_configs").glob("*.json"))}


def config_of(name: str) -> dict:
    """A fresh copy of one config.json."""
    return json.loads(CONFIGS[name].read_text())


def sourced(script: str, before: str = "", after: str = "", cwd: Path = ROOT, **environ: str) -> list[str]:
    """The words of MODEL_ARGS after bash sourced scripts/models/<script>.sh under `set -euo pipefail`."""
    code = f"""set -euo pipefail
    {before}
    source "{ROOT}/scripts/models/{script}.sh"
    {after}
    printf '%s\\0' "${{MODEL_ARGS[@]}}" """
    result = subprocess.run(
        ["bash", "-c", code], capture_output=True, cwd=cwd, env={"PATH": os.environ["PATH"], **environ}
    )
    assert result.returncode == 0 and not result.stderr, result.stderr.decode()
    return result.stdout.decode().split("\0")[:-1]
