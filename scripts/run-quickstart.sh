#!/usr/bin/env bash
# Teaches a tiny model two-digit addition, from nothing to a plot: SFT warm-up, then GRPO, with real Ray, Megatron and SGLang,
# on a plain CPU in less than ten minutes (or on a GPU when there is one).
#   bash scripts/run-quickstart.sh                        # further arguments go to the GRPO run, for example
#   bash scripts/run-quickstart.sh --actor-num-gpus-per-node 2 --num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel
#   NUM_SFT=40 NUM_ROLLOUT=2 bash scripts/run-quickstart.sh   # a look at everything in two minutes
#   DRY_RUN=1 bash scripts/run-quickstart.sh              # only the plan of the GRPO run
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
OUT=${OUT:-outputs/quickstart}
SEED=${SEED:-1234}
NUM_SFT=${NUM_SFT:-480}           # optimizer steps of the warm-up, a multiple of 20
NUM_ROLLOUT=${NUM_ROLLOUT:-150}   # GRPO steps of 64 prompts x 8 responses

bash scripts/bootstrap.sh
python=${SLIME_VENV:-$root/.venv}/bin/python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
source scripts/models/quickstart.sh

COMMON_ARGS=(
   "${MODEL_ARGS[@]}"
   --fp32
   --actor-num-nodes 1
   --actor-num-gpus-per-node 1
   --num-gpus-per-node 1
   --seed "$SEED"
   --rollout-seed "$SEED"
   --rollout-shuffle
   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384
   --optimizer adam
   --weight-decay 0.0
   --clip-grad 1.0
   --attention-dropout 0.0
   --hidden-dropout 0.0
)

GRPO_ARGS=(
   --hf-checkpoint "$OUT/sft-hf"
   --load "$OUT/sft-hf"
   --save "$OUT/grpo"
   --save-hf "$OUT/final"
   --save-interval "$NUM_ROLLOUT"
   --colocate
   --no-offload-train
   --no-offload-rollout
   --sglang-mem-fraction-static 0.3
   --sglang-enable-deterministic-inference
   --prompt-data "$OUT/train.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rm-type exact
   --num-rollout "$NUM_ROLLOUT"
   --rollout-batch-size 64
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-max-response-len 6
   --rollout-skip-special-tokens
   --rollout-temperature 1.0
   --eval-interval "$NUM_ROLLOUT"
   --eval-prompt-data heldout "$OUT/heldout.jsonl"
   --n-samples-per-eval-prompt 4
   --advantage-estimator grpo
   --eps-clip 0.2
   --lr 3e-4
   --lr-decay-style linear
   --min-lr 0
   --adam-beta1 0.9
   --adam-beta2 0.98
   --metrics-jsonl "$OUT/metrics.jsonl"
)

if [[ ${DRY_RUN:-0} != 0 && $DRY_RUN != no && $DRY_RUN != false ]]; then
   exec "$python" train.py "${COMMON_ARGS[@]}" "${GRPO_ARGS[@]}" "$@" --dry-run
fi
if [ -e "$OUT" ]; then
   echo "$OUT exists: remove it to start anew, or set OUT to another directory" >&2
   exit 1
fi

echo "== 1. model and data"
"$python" tools/make_quickstart.py --out "$OUT" --seed "$SEED"

echo "== 2. SFT warm-up: $NUM_SFT steps, then the checkpoint that still has something to learn"
"$python" train.py "${COMMON_ARGS[@]}" \
   --hf-checkpoint "$OUT/base" \
   --save "$OUT/sft" \
   --save-hf "$OUT/warm-up/{rollout_id}" \
   --save-interval 1 \
   --debug-train-only \
   --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
   --loss-type sft_loss \
   --disable-compute-advantages-and-returns \
   --prompt-data "$OUT/sft.jsonl" \
   --input-key messages \
   --num-rollout "$((NUM_SFT / 20))" \
   --rollout-batch-size 1280 \
   --global-batch-size 64 \
   --lr 1e-3 \
   --lr-decay-style constant \
   --adam-beta1 0.9 \
   --adam-beta2 0.95 \
   --metrics-jsonl "$OUT/sft-metrics.jsonl"
"$python" tools/select_checkpoint.py --candidates "$OUT/warm-up" --prompts "$OUT/train.jsonl@[0:512]" \
   --below 0.42 --out "$OUT/sft-hf"

echo "== 3. GRPO: $NUM_ROLLOUT steps of 64 prompts x 8 responses"
"$python" train.py "${COMMON_ARGS[@]}" "${GRPO_ARGS[@]}" "$@"

echo "== 4. result"
"$python" tools/plot_metrics.py "$OUT/metrics.jsonl" --out "$OUT/curves.png"
cat <<TXT
Megatron checkpoint:     $OUT/grpo
Hugging Face checkpoint: $OUT/final
Talk to it:              $python tools/chat.py $OUT/final --prompt '37+58='
TXT
