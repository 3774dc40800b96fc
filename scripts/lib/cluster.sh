# shellcheck shell=bash
# The real run: a Ray cluster over this node and the hosts of HOSTFILE, one job on it, and the end of both.
#
# The directory of the run holds what was started (job, nodes, *.pid) and the logs of `ray start`. Only what is
# recorded there is ever stopped; after the launcher itself was killed, `bash scripts/lib/stop.sh DIRECTORY` does it.

# $1 quoted for a shell on another machine.
slime_quote() { printf "'%s'" "${1//\'/\'\\\'\'}"; }

# "host:port" of Ray's head; an IPv6 address needs brackets.
slime_head_address() {
   local host=${MASTER_ADDR:-127.0.0.1}
   if [[ $host == *:* ]]; then host="[$host]"; fi
   printf '%s:%s\n' "$host" "${RAY_PORT:-6379}"
}

# Whoever reaches the ports of a Ray cluster without a token can run code on it, so each run makes one, in $1/token.
# Not where RAY_AUTH_MODE says what the user wants; a token of the user's own is used.
slime_make_token() {
   [[ -z ${RAY_AUTH_MODE:-} ]] || return 0
   export RAY_AUTH_MODE=token
   if [[ -z ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]]; then
      (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$1/token")
      export RAY_AUTH_TOKEN_PATH="$1/token"
   fi
}

# Prints what the processes of another node need in their environment, as commands of a shell.
slime_remote_environment() {
   local token="${RAY_AUTH_TOKEN:-}"
   if [[ -z $token && -r ${RAY_AUTH_TOKEN_PATH:-} ]]; then token=$(<"$RAY_AUTH_TOKEN_PATH"); fi
   echo 'unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY'
   printf 'export no_proxy=%s NO_PROXY=%s\n' "$(slime_quote "${no_proxy:-}")" "$(slime_quote "${no_proxy:-}")"
   if [[ -n ${RAY_AUTH_MODE:-} ]]; then printf 'export RAY_AUTH_MODE=%s\n' "$(slime_quote "$RAY_AUTH_MODE")"; fi
   if [[ -n $token ]]; then printf 'export RAY_AUTH_TOKEN=%s\n' "$(slime_quote "$token")"; fi
}

# Runs function $2 of node.sh with the further arguments on host $1.
slime_on_host() {
   local host=$1 word
   local -a options=()
   shift
   read -ra options <<<"${SLIME_SSH_OPTIONS:-}"
   {
      cat -- "${SLIME_LIB}/node.sh"
      slime_remote_environment
      for word in "$@"; do printf '%s ' "$(slime_quote "$word")"; done
      echo
   } | ssh -o BatchMode=yes -o ConnectTimeout=15 "${options[@]}" "$host" bash -s
}

# slime_start_head RAY RUN_DIR: this node as head.
slime_start_head() {
   local -a command=("$1" start --head --node-ip-address "${MASTER_ADDR:-127.0.0.1}" --port "${RAY_PORT:-6379}"
      --include-dashboard true --dashboard-host "${RAY_DASHBOARD_HOST:-127.0.0.1}"
      --dashboard-port "${RAY_DASHBOARD_PORT:-8265}" --disable-usage-stats --block)
   if [[ -n ${NUM_GPUS:-} ]]; then command+=(--num-gpus "$NUM_GPUS"); fi
   slime_say "starting Ray on this node, $(slime_head_address)"
   echo head >>"$2/nodes"
   if ! node_start "$2" head "${SLIME_RAY_START_TIMEOUT:-120}" "${command[@]}"; then
      slime_say "Ray did not start on this node. If a cluster runs here already, use it with SLIME_RAY_STARTED=1," \
         "or choose other ports with RAY_PORT and RAY_DASHBOARD_PORT"
      return 1
   fi
}

# slime_start_workers RAY RUN_DIR HOST...: all hosts at once; fails with the names of those on which it did not work.
slime_start_workers() {
   local ray=$1 run_dir=$2 host
   local -a command failed=()
   local -A jobs=()
   shift 2
   for host in "$@"; do
      command=("$ray" start --address "$(slime_head_address)" --disable-usage-stats --block)
      if [[ -n ${NUM_GPUS:-} ]]; then command+=(--num-gpus "$NUM_GPUS"); fi
      # A name is left to Ray: it takes the address that leads to the head.
      if [[ ${host#*@} =~ ^[0-9.]+$ || $host == *:*:* ]]; then command+=(--node-ip-address "${host#*@}"); fi
      echo "$host" >>"$run_dir/nodes"
      slime_on_host "$host" node_start "$run_dir" "worker-$host" "${SLIME_RAY_START_TIMEOUT:-120}" "${command[@]}" \
         >"$run_dir/ssh-$host.log" 2>&1 &
      jobs[$host]=$!
   done
   for host in "$@"; do wait "${jobs[$host]}" || failed+=("$host"); done
   for host in "${failed[@]}"; do
      slime_say "Ray did not start on $host:"
      sed 's/^/   /' "$run_dir/ssh-$host.log" >&2
   done
   ((${#failed[@]} == 0))
}

# slime_start_cluster RAY RUN_DIR: head and workers.
slime_start_cluster() {
   local hosts=""
   local -a workers=()
   if [[ -n ${HOSTFILE:-} ]]; then hosts=$(slime_worker_hosts "$HOSTFILE") || return 1; fi
   if [[ -n $hosts ]]; then mapfile -t workers <<<"$hosts"; fi
   no_proxy=$(slime_no_proxy "${workers[@]}")
   export no_proxy NO_PROXY="$no_proxy"
   slime_make_token "$2"
   slime_start_head "$1" "$2" || return 1
   if ((${#workers[@]} > 0)); then
      slime_say "starting Ray on ${#workers[@]} more nodes: ${workers[*]}"
      slime_start_workers "$1" "$2" "${workers[@]}" || return 1
   elif [[ -n ${MASTER_ADDR:-} && $MASTER_ADDR != 127.0.0.1 ]]; then
      slime_say "HOSTFILE names no other node; to add one, run there: ray start --address $(slime_head_address)" \
         "(RAY_AUTH_MODE=$RAY_AUTH_MODE${RAY_AUTH_TOKEN_PATH:+, with the token in $RAY_AUTH_TOKEN_PATH})"
   fi
}

# Prints succeeded, failed, stopped, running, or unknown when Ray does not answer. Arguments: RAY ADDRESS JOB.
slime_job_state() {
   local text
   text=$("$1" job status --address "$2" "$3" 2>&1) || text=""
   case $text in
      *"'$3' succeeded"*) echo succeeded ;;
      *"'$3' failed"*) echo failed ;;
      *"'$3' was stopped"*) echo stopped ;;
      *"'$3': "*) echo running ;;
      *) echo unknown ;;
   esac
}

# Runs a command in the background and waits for it: bash runs the trap of a signal only between foreground commands.
slime_wait_for() {
   "$@" &
   wait "$!"
}

# slime_submit RUN_DIR RAY ADDRESS JOB JSON COMMAND...: hands the job to Ray.
slime_submit() {
   local log="$1/submit.log" deadline=$((SECONDS + ${SLIME_RAY_START_TIMEOUT:-120}))
   until slime_wait_for "$2" job submit --address "$3" --submission-id "$4" --runtime-env-json "$5" --no-wait \
      -- "${@:6}" >"$log" 2>&1; do
      # A head that is busy answers before the agent that runs jobs is there.
      if ! grep -q 'No available agent' "$log" || ((SECONDS >= deadline)); then
         sed 's/^/   /' "$log" >&2
         slime_say "the job could not be submitted to Ray at $3"
         return 1
      fi
      sleep 2
   done
   slime_say "job $4 runs on Ray at $3"
}

# slime_follow RUN_DIR RAY ADDRESS JOB: shows the job's output until it has ended; 0 if it succeeded. A connection that
# breaks, or a head that is too busy to answer for a while, is not the end of the job.
slime_follow() {
   local state silent=0
   while :; do
      slime_wait_for "$2" job logs --address "$3" --follow "$4" || true
      state=$(slime_job_state "$2" "$3" "$4")
      case $state in
         succeeded) return 0 ;;
         failed | stopped)
            slime_say "job $4 has $([[ $state == failed ]] && echo failed || echo 'been stopped by somebody')"
            return 1
            ;;
         running) silent=0 ;;
         unknown) silent=$((silent + 1)) ;;
      esac
      if [[ -s "$1/head.pid" ]] && ! node_is_up "$1/head.pid"; then
         slime_say "Ray on this node has ended; the end of $1/head.log:"
         tail -n 15 -- "$1/head.log" | sed 's/^/   /' >&2
         return 1
      elif ((silent >= 20)); then
         slime_say "Ray at $3 has not answered for too long"
         return 1
      fi
      slime_say "job $4: its output was interrupted, connecting again"
      sleep "${SLIME_RETRY_SECONDS:-15}"
   done
}

# slime_stop_commands RUN_DIR: ends what this shell has in the background (ssh, ray job submit: a job must not start
# after all), except for the head, which is needed to stop the job.
slime_stop_commands() {
   local pid head="" deadline
   if [[ -s "$1/head.pid" ]]; then read -r head _ <"$1/head.pid"; fi
   for pid in $(jobs -rp); do
      [[ $pid != "$head" ]] || continue
      kill -TERM "$pid" 2>/dev/null || continue
      deadline=$((SECONDS + 10))
      # No `wait` here: in a trap that interrupted a `wait` for the same process, bash 5.2 waits for ever.
      while node_started_at "$pid" >/dev/null && ((SECONDS < deadline)); do sleep 0.1; done
   done
}

# slime_stop RUN_DIR: ends the job and the Ray processes that are recorded there; returns when they have ended.
slime_stop() {
   local ray address job host
   local -a pids=()
   slime_stop_commands "$1"
   if [[ -r "$1/token" ]]; then export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$1/token"; fi
   if [[ -r "$1/job" ]]; then
      { read -r ray && read -r address && read -r job; } <"$1/job"
      case $(slime_job_state "$ray" "$address" "$job") in
         running)
            slime_say "stopping job $job"
            timeout 120 "$ray" job stop --address "$address" "$job" >&2 || slime_say "job $job could not be stopped"
            ;;
         unknown) # not submitted yet, or not answering
            timeout 120 "$ray" job stop --address "$address" "$job" >/dev/null 2>&1 || true
            ;;
      esac
      rm -f -- "$1/job"
   fi
   [[ -r "$1/nodes" ]] || return 0
   slime_say "stopping the Ray processes of this run"
   while IFS= read -r host; do
      if [[ $host == head ]]; then continue; fi
      slime_on_host "$host" node_stop "$1" "worker-$host" >>"$1/ssh-$host.log" 2>&1 &
      pids+=("$!:$host")
   done <"$1/nodes"
   for host in "${pids[@]}"; do
      wait "${host%%:*}" || slime_say "could not stop Ray on ${host#*:}, see $1/ssh-${host#*:}.log; without its head" \
         "it ends by itself after a minute"
   done
   node_stop "$1" head
   rm -f -- "$1/nodes" "$1/token"
}

# slime_run_on_cluster PYTHON RAY ENTRY FLAGS...: see slime_launch. Ends the shell.
slime_run_on_cluster() {
   local python=$1 ray=$2 entry=$3 address=${RAY_ADDRESS:-} run_dir json job number
   job="slime-$(date +%Y%m%d-%H%M%S)-$$"
   run_dir=${SLIME_RUN_DIR:-${TMPDIR:-/tmp}/$(id -un)-$job}
   mkdir -p -- "$run_dir"
   if [[ -e "$run_dir/job" || -e "$run_dir/nodes" ]]; then
      slime_say "$run_dir belongs to a launch that has not ended; to end it: bash scripts/lib/stop.sh $run_dir"
      exit 1
   fi
   # shellcheck disable=SC2064 # expanded now: run_dir is local
   trap "trap '' INT TERM HUP; slime_stop $(slime_quote "$run_dir") || true" EXIT
   for number in 2 15 1; do
      # shellcheck disable=SC2064
      trap "slime_say 'stopping ...'; exit $((128 + number))" "$number"
   done
   slime_say "logs of this launch: $run_dir"
   if [[ -z $address ]] && ! slime_is_yes "${SLIME_RAY_STARTED:-}"; then
      slime_start_cluster "$ray" "$run_dir" || exit 1
   fi
   no_proxy=$(slime_no_proxy)
   export no_proxy NO_PROXY="$no_proxy"
   json=$(slime_runtime_env_json \
      PYTHONPATH="${SLIME_ROOT}${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=1 \
      NCCL_NVLS_ENABLE="$(slime_has_nvlink)" MASTER_ADDR="${MASTER_ADDR:-}" no_proxy="$no_proxy" NO_PROXY="$no_proxy" \
      RAY_JOB_STOP_WAIT_TIME_S=60 "${RUNTIME_ENV[@]}") || exit 1
   address=${address:-http://127.0.0.1:${RAY_DASHBOARD_PORT:-8265}}
   printf '%s\n' "$ray" "$address" "$job" >"$run_dir/job"
   slime_submit "$run_dir" "$ray" "$address" "$job" "$json" "$python" "${SLIME_ROOT}/$entry" "${@:4}" || exit 1
   slime_follow "$run_dir" "$ray" "$address" "$job" || exit 1
   exit 0
}
