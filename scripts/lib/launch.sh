# shellcheck shell=bash
# What all launchers share: `source` it, then end with `slime_launch train.py FLAGS...`.
#
# Variables that a user may set (docs/en/get_started/launch.md describes each):
#   DRY_RUN=1          print the plan of the run and exit: no Ray, no GPU, no weights
#   BASE_DIR           directory of models, data and checkpoints, the same on all nodes (BASE_FOLDER means the same)
#   MASTER_ADDR        address of this node that the other nodes can reach
#   HOSTFILE           the other nodes, one a line: Ray is started on them over ssh
#   RAY_ADDRESS        cluster to use instead of starting one; SLIME_RAY_STARTED=1: the one that runs on this node
#   NUM_GPUS           GPUs of each node that Ray may use; all that it finds when not set
#   RAY_PORT, RAY_DASHBOARD_PORT, RAY_DASHBOARD_HOST, SLIME_RAY_START_TIMEOUT, SLIME_SSH_OPTIONS, SLIME_PYTHON,
#   SLIME_RUN_DIR, SLIME_RETRY_SECONDS
# and one that a launcher may set: RUNTIME_ENV=(NAME=value ...), the environment of all processes of the run.

SLIME_LIB="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
SLIME_ROOT="${SLIME_LIB%/scripts/lib}"
source "${SLIME_LIB}/node.sh"
source "${SLIME_LIB}/hosts.sh"
source "${SLIME_LIB}/cluster.sh"
BASE_DIR=${BASE_DIR:-${BASE_FOLDER:-}}

slime_say() { printf 'slime: %s\n' "$*" >&2; }

# Is the value of a variable a yes? Whatever is not a clear no is one.
slime_is_yes() {
   case $1 in "" | 0 | no | false) return 1 ;; esac
}

# slime_dry_run_default NAME=value...: in a dry run, the value stands in for a variable that is required and not set.
slime_dry_run_default() {
   local pair name
   slime_is_yes "${DRY_RUN:-}" || return 0
   for pair in "$@"; do
      name=${pair%%=*}
      if [[ -z ${!name:-} ]]; then
         slime_say "$name is not set: planning with $pair"
         printf -v "$name" '%s' "${pair#*=}"
      fi
   done
}

# Prints 1 if the GPUs of this node are joined by NVLink, else 0.
slime_has_nvlink() {
   local topology
   topology=$(nvidia-smi topo -m 2>/dev/null) || topology=""
   if grep -Eq '\bNV[0-9]+\b' <<<"$topology"; then echo 1; else echo 0; fi
}

# Prints the Python that runs the driver: SLIME_PYTHON, else that of .venv, else python3.
slime_python() {
   local python="${SLIME_PYTHON:-}"
   if [[ -z $python && -x "${SLIME_ROOT}/.venv/bin/python" ]]; then python="${SLIME_ROOT}/.venv/bin/python"; fi
   if ! command -v "${python:-python3}"; then
      slime_say "${python:-python3} is not there: run \`bash scripts/bootstrap.sh\` or name a Python in SLIME_PYTHON"
      return 1
   fi
}

# Prints the `ray` that belongs to Python $1: the one beside it, else the one on PATH.
slime_ray() {
   if [[ -x "${1%/*}/ray" ]]; then
      echo "${1%/*}/ray"
   elif ! command -v ray; then
      slime_say "no \`ray\` beside $1 and none on PATH: install ray[default] there"
      return 1
   fi
}

# Prints the text $1 as a JSON string.
slime_json_string() {
   local LC_ALL=C text=$1 code char
   text=${text//\\/\\\\}
   text=${text//\"/\\\"}
   if [[ $text == *[[:cntrl:]]* ]]; then
      for code in {1..31} 127; do
         printf -v char '%b' "\\x$(printf '%x' "$code")"
         text=${text//"$char"/$(printf '\\u%04x' "$code")}
      done
   fi
   printf '"%s"' "$text"
}

# Prints {"env_vars": {...}} of NAME=value arguments; of equal names the last counts, an empty value leaves it out.
slime_runtime_env_json() {
   local -A values=()
   local pair name separator=""
   for pair in "$@"; do
      name=${pair%%=*}
      if [[ $pair != *=* || ! $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
         slime_say "RUNTIME_ENV: '$pair' is not NAME=value"
         return 1
      fi
      values[$name]=${pair#*=}
   done
   printf '{"env_vars": {'
   while IFS= read -r name; do
      [[ -n $name && -n ${values[$name]} ]] || continue
      printf '%s%s: %s' "$separator" "$(slime_json_string "$name")" "$(slime_json_string "${values[$name]}")"
      separator=", "
   done < <(printf '%s\n' "${!values[@]}" | LC_ALL=C sort)
   printf '}}'
}

# slime_check PYTHON ENTRY FLAGS...: fails, saying why, if the run would be refused: before Ray starts on all nodes. The
# cluster of RAY_ADDRESS may be other machines, so that files and devices of this one prove nothing.
slime_check() {
   local python=$1 entry=$2 text
   local -a elsewhere=()
   slime_runtime_env_json "${RUNTIME_ENV[@]}" >/dev/null || return 1
   [[ $entry == train.py ]] || return 0   # another entry point may have flags of its own
   if [[ -n ${RAY_ADDRESS:-} ]]; then elsewhere=(--elsewhere); fi
   if ! text=$(env PYTHONPATH="${SLIME_ROOT}${PYTHONPATH:+:$PYTHONPATH}" "${RUNTIME_ENV[@]}" \
      "$python" "${SLIME_ROOT}/tools/plan.py" --check "${elsewhere[@]}" -- "${@:3}" 2>&1); then
      printf '%s\n' "$text" >&2
      slime_say "nothing was started; DRY_RUN=1 shows the whole plan"
      return 1
   fi
}

# slime_launch ENTRY FLAGS...: the run, or its plan when DRY_RUN=1. Ends the shell with an exit code: of a plan 0 or 2;
# of a run 0, 1 when it failed, 2 when its flags are refused, 130 after Ctrl-C, 143 after SIGTERM. What it started has
# ended by then.
slime_launch() {
   local python ray
   python=$(slime_python) || exit 1
   if slime_is_yes "${DRY_RUN:-}"; then
      exec "$python" "${SLIME_ROOT}/$1" "${@:2}" --dry-run
   fi
   ray=$(slime_ray "$python") || exit 1
   slime_check "$python" "$@" || exit 2
   slime_run_on_cluster "$python" "$ray" "$@"
}
