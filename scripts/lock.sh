#!/usr/bin/env bash
# Recompiles requirements.lock from setup.py (run after changing a requirement, then commit both).
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
uv=$(command -v uv || echo .venv/bin/uv)
"$uv" pip compile --quiet --universal --python-version 3.12 --no-emit-index-url --no-emit-find-links \
  --custom-compile-command "bash scripts/lock.sh" --extra test "$@" setup.py -o requirements.lock
