#!/usr/bin/env bash
# GRPO on Kimi-K2-Thinking (1T, 32B active) with 32 nodes of 8 H200 141 GB, optimizer states in host memory. Engines
# of 8 GPUs are to run the INT4 checkpoint, 71 GiB a GPU by the plan. This version can only plan it: it neither pushes
# weights to INT4 engines nor trains with rounded experts, which the two OPEN_TRAINING_INT4 variables ask for.
#
#   MASTER_ADDR=10.0.0.1 HOSTFILE=hosts.txt bash scripts/low_precision/run-kimi-k2-Thinking-int4.sh
#   DRY_RUN=1 bash scripts/low_precision/run-kimi-k2-Thinking-int4.sh     # will it start?
#
# Below BASE_DIR (/root when not set), the same on all nodes: Kimi-K2-Thinking (Hugging Face, INT4), dapo-math-17k,
# aime-2024 and Kimi-K2_thinking_torch_dist (Megatron).
set -euo pipefail

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
source "${SCRIPT_DIR}/lib/launch.sh"
source "${SCRIPT_DIR}/models/kimi-k2-thinking.sh"

slime_dry_run_default MASTER_ADDR=MASTER_ADDR
BASE_DIR=${BASE_DIR:-/root}
MASTER_ADDR=${MASTER_ADDR:?set it to the address of this node that the other nodes can reach}

CLUSTER_ARGS=(
   --actor-num-nodes 32
   --actor-num-gpus-per-node 8
   --colocate
   --update-weight-buffer-size $((4 * 512 * 1024 * 1024))
   --no-check-for-nan-in-loss-and-grad
   --plan-gpu-memory-gb 141
)

CKPT_ARGS=(
   --hf-checkpoint "${BASE_DIR}/Kimi-K2-Thinking/"
   --ref-load "${BASE_DIR}/Kimi-K2_thinking_torch_dist/"
   # resumes from here; while it is empty, training starts from --ref-load
   --load "${BASE_DIR}/Kimi-K2-thinking_slime/"
   --save "${BASE_DIR}/Kimi-K2-thinking_slime/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type math
   --num-rollout 100
   --rollout-batch-size 128
   --n-samples-per-prompt 8
   --rollout-max-response-len 16384
   --rollout-temperature 0.8
   --over-sampling-batch-size 256
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --num-steps-per-rollout 4
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 10
   --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-top-p 0.7
)

PERF_ARGS=(
   --tensor-model-parallel-size 8
   --sequence-parallel
   --pipeline-model-parallel-size 8
   --decoder-last-pipeline-num-layers 5
   --context-parallel-size 4
   --allgather-cp
   --expert-model-parallel-size 32
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis
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
   # --wandb-group kimi-k2-Thinking-int4
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 8
   --sglang-server-concurrency 1024
   --sglang-quantization compressed-tensors
)

MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)

RUNTIME_ENV=(
   NVSHMEM_DISABLE_NCCL=1
   OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1
   OPEN_TRAINING_INT4_GROUP_SIZE=32
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
