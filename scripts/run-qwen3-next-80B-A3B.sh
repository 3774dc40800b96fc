#!/usr/bin/env bash
# GSPO on Qwen3-Next-80B-A3B-Thinking with 4 nodes of 8 GPUs (80 GB), optimizer states in host memory.
#
#   BASE_DIR=/shared MASTER_ADDR=10.0.0.1 HOSTFILE=hosts.txt bash scripts/run-qwen3-next-80B-A3B.sh
#   DRY_RUN=1 bash scripts/run-qwen3-next-80B-A3B.sh     # will it start? Answered anywhere, without a GPU
#
# Below BASE_DIR, which all nodes see: Qwen3-Next-80B-A3B-Thinking (Hugging Face), dapo-math-17k, aime-2024 and
# Qwen3-Next-80B-A3B-Thinking_torch_dist (Megatron).
set -euo pipefail

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${SCRIPT_DIR}/lib/launch.sh"
source "${SCRIPT_DIR}/models/qwen3-next-80B-A3B.sh"

slime_dry_run_default BASE_DIR=/BASE_DIR MASTER_ADDR=MASTER_ADDR
BASE_DIR=${BASE_DIR:?set it to a directory that all nodes share; models, data and checkpoints are below it}
MASTER_ADDR=${MASTER_ADDR:?set it to the address of this node that the other nodes can reach}
ACTOR_NUM_NODES=${ACTOR_NUM_NODES:-4}
ACTOR_NUM_GPUS_PER_NODE=${ACTOR_NUM_GPUS_PER_NODE:-8}
CP_SIZE=${CP_SIZE:-2}
SOCKET_IFNAME=${SOCKET_IFNAME:-}   # network interface between the nodes; found by gloo when empty

CLUSTER_ARGS=(
   --actor-num-nodes "${ACTOR_NUM_NODES}"
   --actor-num-gpus-per-node "${ACTOR_NUM_GPUS_PER_NODE}"
   --colocate
)

CKPT_ARGS=(
   --hf-checkpoint "${BASE_DIR}/Qwen3-Next-80B-A3B-Thinking"
   --ref-load "${BASE_DIR}/Qwen3-Next-80B-A3B-Thinking_torch_dist"
   # resumes from here; while it is empty, training starts from --ref-load
   --load "${BASE_DIR}/Qwen3-Next-80B-A3B-Thinking_slime/"
   --save "${BASE_DIR}/Qwen3-Next-80B-A3B-Thinking_slime/"
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
   --rollout-batch-size 8
   --n-samples-per-prompt 8
   --rollout-max-response-len 32768
   --rollout-temperature 1
   --global-batch-size 64
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 8
   --eval-max-response-len 32768
   --eval-top-p 1
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 4
   --decoder-last-pipeline-num-layers 9
   --context-parallel-size "${CP_SIZE}"
   --allgather-cp
   --expert-model-parallel-size 8
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
)

# To stay near the reference model: --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
GRPO_ARGS=(
   --advantage-estimator gspo
   --entropy-coef 0.00
   --eps-clip 4e-4
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
   # --wandb-group qwen3-next-80B-A3B
)

# shellcheck disable=SC2207 # each number that seq prints is a value
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.8
   --sglang-ep-size 8
   --sglang-cuda-graph-bs-decode 1 2 4 8 $(seq 16 8 128)
   --sglang-max-running-requests 256
   # the model's MTP layer drafts
   --sglang-speculative-algorithm EAGLE
   --sglang-speculative-num-steps 3
   --sglang-speculative-eagle-topk 1
   --sglang-speculative-num-draft-tokens 4
)

MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
   --moe-token-dispatcher-type flex
   --moe-flex-dispatcher-backend deepep
)

RUNTIME_ENV=(
   GLOO_SOCKET_IFNAME="${SOCKET_IFNAME}"
   TP_SOCKET_IFNAME="${SOCKET_IFNAME}"
   NVSHMEM_DISABLE_NCCL=1
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
