#!/usr/bin/env bash
# GRPO on GLM-5.2 (744B, 40B active; sparse attention with shared indices) with 32 nodes of 8 H100 80 GB.
# Four engines of 64 GPUs run the FP8 checkpoint. SGLANG_CONFIG_FILE=scripts/configs/glm5.2-744B-A40B-engines.yaml
# makes one of them prefill and three decode.
#
#   BASE_DIR=/shared MASTER_ADDR=10.0.0.1 HOSTFILE=hosts.txt bash scripts/run-glm5.2-744B-A40B.sh
#   DRY_RUN=1 bash scripts/run-glm5.2-744B-A40B.sh     # will it start? Answered anywhere, without a GPU
#
# Below BASE_DIR, which all nodes see: GLM-5.2-FP8 (Hugging Face), GLM-5.2_torch_dist (Megatron), dapo-math-17k.
set -euo pipefail

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${SCRIPT_DIR}/lib/launch.sh"
source "${SCRIPT_DIR}/models/glm5.2-744B-A40B.sh"

slime_dry_run_default BASE_DIR=/BASE_DIR MASTER_ADDR=MASTER_ADDR
BASE_DIR=${BASE_DIR:?set it to a directory that all nodes share; models, data and checkpoints are below it}
MASTER_ADDR=${MASTER_ADDR:?set it to the address of this node that the other nodes can reach}
SGLANG_CONFIG_FILE=${SGLANG_CONFIG_FILE:-}   # engines of several kinds; all alike when empty
SOCKET_IFNAME=${SOCKET_IFNAME:-}   # network interface between the nodes; found by NCCL and gloo when empty
IB_DEVICES=${IB_DEVICES:-mlx5_100,mlx5_101,mlx5_102,mlx5_103,mlx5_104,mlx5_105,mlx5_106,mlx5_107}   # see ibv_devices

CLUSTER_ARGS=(
   --actor-num-nodes 32
   --actor-num-gpus-per-node 8
   --colocate
   --update-weight-buffer-size $((1024 * 1024 * 1024 * 2))
   --no-check-for-nan-in-loss-and-grad
)

CKPT_ARGS=(
   --hf-checkpoint "${BASE_DIR}/GLM-5.2-FP8"
   --ref-load "${BASE_DIR}/GLM-5.2_torch_dist"
   --load "${BASE_DIR}/GLM-5.2_slime"   # resumes from here; while it is empty, training starts from --ref-load
   --save "${BASE_DIR}/GLM-5.2_slime"
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
   --rollout-max-response-len 65536
   --rollout-temperature 1.0
   --global-batch-size 64
)

# Stages of 14, 6 x 8 and 16 layers: each starts on a layer that computes its own top-k indices, as it must.
PERF_ARGS=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 8
   --decoder-first-pipeline-num-layers 14
   --decoder-last-pipeline-num-layers 16
   --context-parallel-size 8
   --expert-model-parallel-size 32
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
   --data-pad-size-multiplier 1024
   --log-probs-chunk-size 16384
)

# To train the MTP layer along: --mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2
MTP_ARGS=()

# To stay near the reference model: --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
GRPO_ARGS=(
   --advantage-estimator grpo
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis
   --tis-clip-low 0.5
   --tis-clip 2.0
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
   # --wandb-group glm5.2-744B-A40B
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 64
   --sglang-mem-fraction-static 0.70
   --sglang-enable-dp-attention
   --sglang-ep-size 64
   --sglang-dp-size 64
   --sglang-moe-dense-tp-size 1
   --sglang-enable-dp-lm-head
   --sglang-moe-a2a-backend deepep
   --sglang-deepep-mode auto
   --sglang-page-size 64
   --sglang-kv-cache-dtype fp8_e4m3
   --sglang-attention-backend dsa
   --sglang-dsa-decode-backend flashmla_kv
   --sglang-dsa-prefill-backend flashmla_sparse
   --sglang-cuda-graph-max-bs-decode 8
   --sglang-disable-overlap-schedule
   --sglang-max-running-requests 512
   --sglang-watchdog-timeout 3600
   # the model's MTP layer drafts
   --sglang-speculative-algorithm EAGLE
   --sglang-speculative-num-steps 4
   --sglang-speculative-eagle-topk 1
   --sglang-speculative-num-draft-tokens 5
   --sglang-speculative-draft-attention-backend dsa
)

DISAGGREGATION_ARGS=()
if [[ -n ${SGLANG_CONFIG_FILE} ]]; then
   DISAGGREGATION_ARGS=(
      --sglang-config "${SGLANG_CONFIG_FILE}"
      --sglang-disaggregation-transfer-backend mooncake
      --sglang-disaggregation-ib-device "${IB_DEVICES}"
   )
fi

MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
   --moe-token-dispatcher-type alltoall
)

RUNTIME_ENV=(
   GLOO_SOCKET_IFNAME="${SOCKET_IFNAME}"
   TP_SOCKET_IFNAME="${SOCKET_IFNAME}"
   NCCL_SOCKET_IFNAME="${SOCKET_IFNAME}"
   NCCL_P2P_LEVEL=NVL
   NCCL_NVLS_ENABLE=0
   NCCL_CUMEM_ENABLE=0
   NCCL_NET_GDR_LEVEL=2
   NCCL_IB_QPS_PER_CONNECTION=2
   NCCL_IB_TC=160
   NCCL_IB_TIMEOUT=22
   NCCL_PXN_DISABLE=0
   NCCL_MIN_CTAS=4
   NVTE_FWD_LAYERNORM_SM_MARGIN=8
   NVTE_BWD_LAYERNORM_SM_MARGIN=8
   MC_IB_PCI_RELAXED_ORDERING=1
   MLP_SKIP_SORT_RDMA=true
   SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=64
   SGLANG_JIT_DEEPGEMM_PRECOMPILE=true
   NVSHMEM_DISABLE_NCCL=1
)

slime_launch train.py \
   "${MODEL_ARGS[@]}" \
   "${CLUSTER_ARGS[@]}" \
   "${CKPT_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${MTP_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${WANDB_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   "${DISAGGREGATION_ARGS[@]}" \
   "${MISC_ARGS[@]}" \
   "$@"
