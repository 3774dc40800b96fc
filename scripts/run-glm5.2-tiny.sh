#!/usr/bin/env bash
# GLM-5.2 in small, from random weights: checkpoint, conversion, then GRPO with real Ray, Megatron and SGLang on sequences
# longer than the number of tokens that sparse attention chooses. Every step prints how far engine and trainer differ.
#   bash scripts/run-glm5.2-tiny.sh                 # on a CPU; further arguments go to train.py
#   SHAPE=h200 bash scripts/run-glm5.2-tiny.sh      # attention of the published size, 2,200-token prompts: one H200
#   SHAPE=h200 GPUS=2 bash scripts/run-glm5.2-tiny.sh   # trainer and engine on a GPU each
#   DRY_RUN=1 bash scripts/run-glm5.2-tiny.sh       # only the plan; writes nothing
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
SHAPE=${SHAPE:-tiny}
OUT=${OUT:-outputs/glm5.2-$SHAPE}
SEED=${SEED:-1234}
GPUS=${GPUS:-1}   # 1: trainer and engine share it; 2: one each

bash scripts/bootstrap.sh
python=${SLIME_VENV:-$root/.venv}/bin/python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

case $SHAPE in
   tiny)
      NUM_ROLLOUT=${NUM_ROLLOUT:-3}
      PROMPTS=8
      SHAPE_ARGS=(
         --fp32
         --rollout-max-response-len 16
         --max-tokens-per-gpu 320
         --lr 2e-3
         --no-offload-train
         --no-offload-rollout
         --sglang-mem-fraction-static 0.3
         --sglang-enable-deterministic-inference
      )
      ;;
   h200)
      NUM_ROLLOUT=${NUM_ROLLOUT:-21}
      PROMPTS=2
      SHAPE_ARGS=(
         --bf16
         --accumulate-allreduce-grads-in-fp32
         --attention-softmax-in-fp32
         --rollout-max-response-len 64
         --max-tokens-per-gpu 4864
         --lr 5e-4
         --sglang-mem-fraction-static 0.35
         --sglang-attention-backend dsa
         --sglang-dsa-prefill-backend flashmla_sparse
         --sglang-dsa-decode-backend fa3
      )
      ;;
   *) echo "SHAPE=$SHAPE: tiny or h200" >&2; exit 2 ;;
esac
case $GPUS in
   1) PLACE_ARGS=(--num-gpus-per-node 1 --colocate) ;;
   2) PLACE_ARGS=(--num-gpus-per-node 2 --rollout-num-gpus 1) ;;
   *) echo "GPUS=$GPUS: 1 or 2" >&2; exit 2 ;;
esac

TRAIN_ARGS=(
   "${SHAPE_ARGS[@]}"
   "${PLACE_ARGS[@]}"
   --actor-num-nodes 1
   --actor-num-gpus-per-node 1
   --rollout-num-gpus-per-engine 1
   --seed "$SEED"
   --rollout-seed "$SEED"
   --rollout-shuffle
   --input-key prompt
   --label-key label
   --custom-rm-path "$root/examples/glm5_tiny/reward.py:reward_func"
   --num-rollout "$NUM_ROLLOUT"
   --rollout-batch-size "$PROMPTS"
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-temperature 1.0
   --use-dynamic-batch-size
   --advantage-estimator grpo
   --eps-clip 0.2
   --optimizer adam
   --lr-decay-style constant
   --adam-beta1 0.9
   --adam-beta2 0.98
   --weight-decay 0.0
   --clip-grad 1.0
   --attention-dropout 0.0
   --hidden-dropout 0.0
)

if [[ ${DRY_RUN:-0} != 0 && $DRY_RUN != no && $DRY_RUN != false ]]; then
   dry=$(mktemp -d)
   trap 'rm -rf "$dry"' EXIT
   "$python" tools/make_glm5_tiny.py --out "$dry" --shape "$SHAPE" --seed "$SEED" --no-weights
   "$python" train.py "${TRAIN_ARGS[@]}" --hf-checkpoint "$dry/hf" --load "$dry/hf" --prompt-data "$dry/prompts.jsonl" \
      "$@" --dry-run
   exit
fi
if [ -e "$OUT" ]; then
   echo "$OUT exists: remove it to start anew, or set OUT to another directory" >&2
   exit 1
fi

echo "== 1. checkpoint and prompts"
"$python" tools/make_glm5_tiny.py --out "$OUT" --shape "$SHAPE" --seed "$SEED"

echo "== 2. Megatron checkpoint"
"$python" tools/convert_hf_to_torch_dist.py --hf-checkpoint "$OUT/hf" --save "$OUT/torch_dist"

echo "== 3. GRPO: $NUM_ROLLOUT steps of $PROMPTS prompts x 8 responses"
"$python" train.py "${TRAIN_ARGS[@]}" \
   --hf-checkpoint "$OUT/hf" \
   --load "$OUT/torch_dist" \
   --prompt-data "$OUT/prompts.jsonl" \
   --save "$OUT/checkpoints" \
   --save-hf "$OUT/final" \
   --save-interval "$NUM_ROLLOUT" \
   --no-save-optim \
   --metrics-jsonl "$OUT/metrics.jsonl" \
   "$@"

echo "== 4. result"
cat <<TXT
Metrics of every step:   $OUT/metrics.jsonl
Hugging Face checkpoint: $OUT/final
TXT
