#!/usr/bin/env bash
# Ends the job and the Ray processes of a launch whose launcher was killed: bash scripts/lib/stop.sh DIRECTORY
# DIRECTORY is the one that the launcher named at its start ("logs of this launch: ..."). Nothing else is touched.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"
directory=${1:?the directory that the launcher named at its start}
if [[ ! -d $directory ]]; then
   slime_say "$directory is not a directory"
   exit 1
fi
slime_stop "$directory"
