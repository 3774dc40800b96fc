#!/usr/bin/env bash
# Creates .venv with everything slime needs, from requirements.lock. Idempotent: when nothing changed it returns at once.
#   bash scripts/bootstrap.sh            then: .venv/bin/python train.py --help
# SLIME_PYTHON=/path/to/python chooses the interpreter; SLIME_VENV=/path the environment (default: .venv in the repository).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SLIME_VENV:-$root/.venv}
uv_version=0.13.9

say() { printf 'bootstrap: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

# A candidate counts only when it runs: a pyenv shim, for one, is on PATH even for versions that are not selected.
is_python312() { "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in ${SLIME_PYTHON:-} python3.12 python3.13 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python; do
    if is_python312 "$candidate"; then command -v "$candidate"; return; fi
  done
  if command -v uv >/dev/null && candidate=$(uv python find '>=3.12,<3.14' 2>/dev/null) && is_python312 "$candidate"; then
    echo "$candidate"
    return
  fi
  fail "no Python 3.12 or 3.13 found (looked on PATH, in pyenv and with uv). Install one, for example" \
    "\`apt-get install python3.12 python3.12-venv\`, \`pyenv install 3.12\` or \`uv python install 3.12\`, or name one in SLIME_PYTHON."
}

find_uv() {
  if command -v uv >/dev/null; then command -v uv; return; fi
  if [ ! -x "$venv/bin/uv" ]; then
    say "installing uv $uv_version into $venv"
    "$venv/bin/python" -m ensurepip --upgrade >/dev/null 2>&1 \
      || fail "$("$venv/bin/python" -V) has no pip: install its venv package (Debian: python3.12-venv) or put uv on PATH"
    "$venv/bin/python" -m pip install --quiet "uv==$uv_version"
  fi
  echo "$venv/bin/uv"
}

[ "$(uname -s)/$(uname -m)" = Linux/x86_64 ] || fail "the pinned wheels are for Linux on x86-64, this is $(uname -s)/$(uname -m)"
stamp=$venv/.slime-installed
state=$(cat "$root/requirements.lock" "$root/setup.py" | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then exit 0; fi

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  say "creating $venv with $python"
  "$python" -m venv --without-pip "$venv" || fail "$python cannot make a virtual environment"
fi
is_python312 "$venv/bin/python" || fail "$venv holds $("$venv/bin/python" -V 2>&1), slime needs 3.12 or 3.13: remove $venv and run this again"
uv=$(find_uv)
say "installing the pinned packages (about 9 GB on disk; one to a few minutes)"
UV_LINK_MODE=${UV_LINK_MODE:-hardlink} "$uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" -r "$root/requirements.lock"
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --editable "$root"
echo "$state" >"$stamp"
say "ready: $("$venv/bin/python" -V) in $venv"
