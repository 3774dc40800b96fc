#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B with one node of 8 GPUs (80 GB), optimizer states in host memory.
#
#   bash scripts/run-qwen3-30B-A3B.sh
#   DRY_RUN=1 bash scripts/run-qwen3-30B-A3B.sh     # will it start? Answered anywhere, without a GPU
#
# Below BASE_DIR (/root when not set): Qwen3-30B-A3B (Hugging Face), Qwen3-30B-A3B_torch_dist (Megatron), dapo-math-17k
# and aime-2024.
set -euo pipefail

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${SCRIPT_DIR}/lib/launch.sh"
source "${SCRIPT_DIR}/models/qwen3-30B-A3B.sh"

BASE_DIR=${BASE_DIR:-/root}

CLUSTER_ARGS=(
   --actor-num-nodes 1
   --actor-num-gpus-per-node 8
   --colocate
)

CKPT_ARGS=(
   --hf-checkpoint "${BASE_DIR}/Qwen3-30B-A3B"
   --ref-load "${BASE_DIR}/Qwen3-30B-A3B_torch_dist"
   --load "${BASE_DIR}/Qwen3-30B-A3B_slime/"   # resumes from here; while it is empty, training starts from --ref-load
   --save "${BASE_DIR}/Qwen3-30B-A3B_slime/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --global-batch-size 256
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-top-p 1
)

PERF_ARGS=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 20480
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
   --optimizer-cpu-offload
   --overlap-cpu-optimizer-d2h-h2d
   --use-precision-aware-optimizer
)

WANDB_ARGS=(
   # --use-wandb
   # --wandb-project slime-dev
   # --wandb-group qwen3-30B-A3B
)

# shellcheck disable=SC2207 # each number that seq prints is a value
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   --sglang-cuda-graph-bs-decode 1 2 4 8 $(seq 16 8 256)
)

MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)

slime_launch train.py \
   "${MODEL_ARGS[@]}" \
   "${CLUSTER_ARGS[@]}" \
   "${CKPT_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${EVAL_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${WANDB_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   "${MISC_ARGS[@]}" \
   "$@"
