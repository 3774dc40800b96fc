#!/usr/bin/env bash
# GRPO on DeepSeek-R1 (671B, 37B active) with 16 nodes of 8 H100 80 GB, optimizer states in host memory.
#
#   BASE_DIR=/shared MASTER_ADDR=10.0.0.1 HOSTFILE=hosts.txt bash scripts/run-deepseek-r1.sh
#   DRY_RUN=1 bash scripts/run-deepseek-r1.sh     # will it start? Answered anywhere, without a GPU
#
# Below BASE_DIR, which all nodes see: DeepSeek-R1 (Hugging Face), DeepSeek-R1_torch_dist (Megatron), dapo-math-17k and
# rl_data/aime-2024.jsonl.
set -euo pipefail

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${SCRIPT_DIR}/lib/launch.sh"
source "${SCRIPT_DIR}/models/deepseek-v3.sh"

slime_dry_run_default BASE_DIR=/BASE_DIR MASTER_ADDR=MASTER_ADDR
BASE_DIR=${BASE_DIR:?set it to a directory that all nodes share; models, data and checkpoints are below it}
MASTER_ADDR=${MASTER_ADDR:?set it to the address of this node that the other nodes can reach}

CLUSTER_ARGS=(
   --actor-num-nodes 16
   --actor-num-gpus-per-node 8
   --colocate
)

CKPT_ARGS=(
   --hf-checkpoint "${BASE_DIR}/DeepSeek-R1/"
   --ref-load "${BASE_DIR}/DeepSeek-R1_torch_dist/"
   --load "${BASE_DIR}/DeepSeek-R1_slime/"   # resumes from here; while it is empty, training starts from --ref-load
   --save "${BASE_DIR}/DeepSeek-R1_slime/"
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
   --rollout-batch-size 128
   --n-samples-per-prompt 8
   --rollout-max-response-len 32768
   --rollout-temperature 1
   --over-sampling-batch-size 256
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --num-steps-per-rollout 4
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime "${BASE_DIR}/rl_data/aime-2024.jsonl"
   --n-samples-per-eval-prompt 8
   --eval-max-response-len 32768
   --eval-top-p 1
)

PERF_ARGS=(
   --tensor-model-parallel-size 8
   --sequence-parallel
   --pipeline-model-parallel-size 4
   --decoder-last-pipeline-num-layers 13
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
   # --wandb-group deepseek-r1
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 64
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 64
   --sglang-enable-dp-attention
   --sglang-dp-size 8
   --sglang-moe-dense-tp-size 1
   --sglang-enable-dp-lm-head
   --sglang-moe-a2a-backend deepep
   --sglang-deepep-mode auto
   --sglang-server-concurrency 1024
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

LIBRARIES=/usr/local/nvidia/lib:/usr/local/nvidia/lib64:/sgl-workspace/nvshmem/install/lib/   # of the container image
RUNTIME_ENV=(
   NVSHMEM_DISABLE_NCCL=1
   LD_LIBRARY_PATH="${LIBRARIES}${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}"
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
