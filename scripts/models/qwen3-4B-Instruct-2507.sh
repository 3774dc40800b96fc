# shellcheck shell=bash disable=SC1091
# Qwen3-4B for longer contexts.
MODEL_ARGS_ROTARY_BASE=5000000 source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3-4B.sh"
