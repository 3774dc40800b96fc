# shellcheck shell=bash
# Starts and ends the Ray processes of one node. The head runs it in place, the other nodes get it over ssh as text,
# so it uses nothing but its arguments.
#
# `ray stop` is of no use here: it ends every Ray process of the machine, also those of another cluster. Instead
# `ray start --block` stays, takes its children along when it ends, and is known by its process id and start time.

# Prints the time at which process $1 started, in clock ticks since boot; fails when there is no such process any more.
node_started_at() {
   local stat
   stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
   read -ra stat <<<"${stat##*) }" # the name before it may hold spaces and parentheses
   [[ ${stat[0]} != [ZX] ]] || return 1
   printf '%s\n' "${stat[19]}"
}

# Is the process that file $1 records ("pid start-time") still the one that was started?
node_is_up() {
   local pid started
   [[ -r $1 ]] && read -r pid started <"$1" && [[ "$(node_started_at "$pid")" == "$started" ]]
}

# Prints the file in which Ray notes the newest cluster of this node, for every `ray.init()` that is told no address.
node_address_file() { printf '%s/ray/ray_current_cluster\n' "${RAY_TMPDIR:-${TMPDIR:-/tmp}}"; }

# node_start DIRECTORY NAME SECONDS COMMAND...: runs COMMAND (ray start --block) in the background and returns once it
# says that it is done. Writes DIRECTORY/NAME.pid and NAME.log. Fails with the end of the log if it ends or takes longer.
node_start() {
   local pid_file="$1/$2.pid" log="$1/$2.log" deadline=$((SECONDS + $3)) pid why=""
   mkdir -p -- "$1"
   shift 3
   : >"$log"
   set -m # a process group of its own: Ctrl-C in the terminal reaches the launcher alone, which stops the job first
   "$@" </dev/null >"$log" 2>&1 &
   pid=$!
   set +m
   printf '%s %s\n' "$pid" "$(node_started_at "$pid")" >"$pid_file"
   until grep -q 'will now block' "$log"; do # the last thing it says, after it has written its note
      if ! node_is_up "$pid_file"; then
         why="\`$*\` ended"
      elif ((SECONDS >= deadline)); then
         why="\`$*\` is not ready in time"
      fi
      if [[ -n $why ]]; then
         printf '%s; the end of %s on %s:\n' "$why" "$log" "$(uname -n)" >&2
         tail -n 15 -- "$log" | sed 's/^/   /' >&2
         node_stop "${pid_file%/*}" "$(basename -- "$pid_file" .pid)"
         return 1
      fi
      sleep 0.2
   done
   cat -- "$(node_address_file)" >"${pid_file%.pid}.address" 2>/dev/null || true
}

# node_stop DIRECTORY NAME: ends what node_start started, if it still runs, and waits until it has ended. Takes back
# Ray's note of it, too: later programs would try to join a cluster that is gone.
node_stop() {
   local pid_file="$1/$2.pid" pid started deadline=$((SECONDS + 30))
   if node_is_up "$pid_file"; then
      read -r pid started <"$pid_file"
      kill -TERM "$pid" 2>/dev/null || true
      while node_is_up "$pid_file" && ((SECONDS < deadline)); do sleep 0.2; done
      if node_is_up "$pid_file"; then
         printf 'process %s did not end within 30 s: killed\n' "$pid" >&2
         kill -KILL "$pid" 2>/dev/null || true # Ray's processes end with their parent
      fi
   fi
   if [[ -s "${pid_file%.pid}.address" ]] && cmp -s "${pid_file%.pid}.address" "$(node_address_file)"; then
      rm -f -- "$(node_address_file)"
   fi
   rm -f -- "$pid_file" "${pid_file%.pid}.address"
}
