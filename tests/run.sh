#!/usr/bin/env bash
# Sets everything up and runs the whole test suite; further arguments go to pytest (for example `-m "not e2e"`, `-k packing`).
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/bootstrap.sh"
cd "$root"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
exec "${SLIME_VENV:-$root/.venv}/bin/python" -m pytest "$@"
