# shellcheck shell=bash disable=SC1091
# The same model on AMD GPUs.
source "$(dirname -- "${BASH_SOURCE[0]}")/llama3.2-3B-Instruct.sh"
