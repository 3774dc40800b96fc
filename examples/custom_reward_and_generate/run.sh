#!/usr/bin/env bash
# GRPO on the quickstart's supervised model with a reward and a generate function of its own.
#   bash examples/custom_reward_and_generate/run.sh      # further arguments go to train.py
# Run scripts/run-quickstart.sh first: it makes the model and the data in QUICKSTART.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
here=$root/examples/custom_reward_and_generate
cd "$root"
QUICKSTART=${QUICKSTART:-outputs/quickstart}
OUT=${OUT:-outputs/custom_reward_and_generate}
NUM_ROLLOUT=${NUM_ROLLOUT:-60}
if [ ! -e "$QUICKSTART/sft-hf/config.json" ]; then
   echo "$QUICKSTART/sft-hf holds no checkpoint: run scripts/run-quickstart.sh first, or set QUICKSTART" >&2
   exit 1
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
source scripts/models/quickstart.sh

exec "${SLIME_VENV:-$root/.venv}/bin/python" train.py \
   "${MODEL_ARGS[@]}" \
   --fp32 \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 1 \
   --num-gpus-per-node 1 \
   --colocate \
   --no-offload-train \
   --no-offload-rollout \
   --sglang-mem-fraction-static 0.3 \
   --hf-checkpoint "$QUICKSTART/sft-hf" \
   --load "$QUICKSTART/sft-hf" \
   --save "$OUT/checkpoints" \
   --save-hf "$OUT/final" \
   --save-interval "$NUM_ROLLOUT" \
   --prompt-data "$QUICKSTART/train.jsonl" \
   --input-key prompt \
   --label-key label \
   --apply-chat-template \
   --rollout-shuffle \
   --custom-generate-function-path "$here/generate.py:generate" \
   --custom-rm-path "$here/reward.py:reward_func" \
   --num-rollout "$NUM_ROLLOUT" \
   --rollout-batch-size 64 \
   --n-samples-per-prompt 8 \
   --num-steps-per-rollout 1 \
   --rollout-max-response-len 6 \
   --rollout-temperature 1.0 \
   --eval-interval 20 \
   --eval-prompt-data heldout "$QUICKSTART/heldout.jsonl" \
   --use-dynamic-batch-size \
   --max-tokens-per-gpu 16384 \
   --advantage-estimator grpo \
   --optimizer adam \
   --weight-decay 0.0 \
   --attention-dropout 0.0 \
   --hidden-dropout 0.0 \
   --lr 3e-4 \
   --lr-decay-style constant \
   --metrics-jsonl "$OUT/metrics.jsonl" \
   "$@"
