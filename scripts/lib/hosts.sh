# shellcheck shell=bash
# Who takes part: the host file, the addresses of this node, and the hosts that no proxy may stand before.

# Prints every address and name of host $1, itself included, one a line. A name nobody knows has only itself.
slime_names_of() {
   printf '%s\n' "$1"
   { timeout 5 getent ahosts "$1" || true; } 2>/dev/null | while read -r address _; do printf '%s\n' "$address"; done
}

# Prints the names and addresses of this node and of MASTER_ADDR, one a line.
slime_local_names() {
   printf '%s\n' localhost 127.0.0.1 ::1
   uname -n
   { hostname -f || true; } 2>/dev/null
   { hostname -I || true; } 2>/dev/null | tr ' ' '\n'
   slime_names_of "${MASTER_ADDR:-127.0.0.1}"
}

# Prints the hosts of file $1 on which Ray is to be started: the first word of each line, once, without comments and
# without this node. `user@host` is kept; `slots=8` and `host:8` of MPI host files are cut off. Fails if unreadable.
slime_worker_hosts() {
   local line host local_names
   local -A seen=()
   if [[ ! -r $1 ]]; then
      slime_say "HOSTFILE=$1 cannot be read: it lists the other nodes, one a line"
      return 1
   fi
   local_names=$(slime_local_names)
   while IFS= read -r line || [[ -n $line ]]; do
      read -r host _ <<<"${line%%#*}" || true
      if [[ $host =~ ^[^:]+:[0-9]+$ ]]; then host=${host%:*}; fi
      [[ -n $host && -z ${seen[$host]:-} ]] || continue
      seen[$host]=1
      if ! grep -Fxq -f <(slime_names_of "${host#*@}") <<<"$local_names"; then printf '%s\n' "$host"; fi
   done < <(tr -d '\r' <"$1")
}

# Prints the no_proxy list: loopback, MASTER_ADDR, the hosts given as arguments, and what no_proxy already holds.
slime_no_proxy() {
   local host list="localhost,127.0.0.1,0.0.0.0"
   local -a before=()
   IFS=', ' read -ra before <<<"${no_proxy:-${NO_PROXY:-}}"
   for host in "${MASTER_ADDR:-}" "$@" "${before[@]}"; do
      host=${host#*@}
      if [[ -n $host && ",$list," != *",$host,"* ]]; then list+=",$host"; fi
   done
   printf '%s\n' "$list"
}
