#!/usr/bin/env bash
# GSPO on GLM-4.7 (355B, 32B active) with 8 nodes of 8 H100 80 GB, optimizer states in host memory.
#
#   BASE_DIR=/shared MASTER_ADDR=10.0.0.1 HOSTFILE=hosts.txt bash scripts/run-glm4.7-355B-A32B.sh
#   DRY_RUN=1 bash scripts/run-glm4.7-355B-A32B.sh     # will it start? Answered anywhere, without a GPU
#
# Below BASE_DIR, which all nodes see: GLM-4.7-355B-A32B (Hugging Face), GLM-4.7-355B-A32B_torch_dist (Megatron),
# dapo-math-17k and rl_data/aime-2024.jsonl. The architecture is that of GLM-4.5-355B-A32B.
set -euo pipefail

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${SCRIPT_DIR}/lib/launch.sh"
source "${SCRIPT_DIR}/models/glm4.5-355B-A32B.sh"

slime_dry_run_default BASE_DIR=/BASE_DIR MASTER_ADDR=MASTER_ADDR
BASE_DIR=${BASE_DIR:?set it to a directory that all nodes share; models and data are below it}
MASTER_ADDR=${MASTER_ADDR:?set it to the address of this node that the other nodes can reach}
ACTOR_NUM_NODES=${ACTOR_NUM_NODES:-8}
ACTOR_NUM_GPUS_PER_NODE=${ACTOR_NUM_GPUS_PER_NODE:-8}
SOCKET_IFNAME=${SOCKET_IFNAME:-}   # network interface between the nodes; found by gloo when empty

CLUSTER_ARGS=(
   --actor-num-nodes "${ACTOR_NUM_NODES}"
   --actor-num-gpus-per-node "${ACTOR_NUM_GPUS_PER_NODE}"
   --colocate
)

CKPT_ARGS=(
   --hf-checkpoint "${BASE_DIR}/GLM-4.7-355B-A32B"
   --ref-load "${BASE_DIR}/GLM-4.7-355B-A32B_torch_dist/"
   # to keep what is learnt, and to go on from it:
   # --load "${BASE_DIR}/GLM-4.7-355B-A32B_slime/"
   # --save "${BASE_DIR}/GLM-4.7-355B-A32B_slime/"
   # --save-interval 20
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
   --rollout-stop-token-ids 151329 151336 151338
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
   --context-parallel-size 2
   --allgather-cp
   --expert-model-parallel-size 16
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384
)

# To train the MTP layer along: --mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2
MTP_ARGS=()

# To stay near the reference model: --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
GRPO_ARGS=(
   --advantage-estimator gspo
   --entropy-coef 0.00
   --eps-clip 1e-4
   --eps-clip-high 2e-4
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
   # --wandb-group glm4.7-355B-A32B
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 32
   --sglang-mem-fraction-static 0.7
   --sglang-enable-dp-attention
   --sglang-dp-size 4
   --sglang-ep-size 32
   --sglang-enable-dp-lm-head
   --sglang-moe-dense-tp-size 1
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
   "${MTP_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${WANDB_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   "${MISC_ARGS[@]}" \
   "$@"
