# shellcheck shell=bash disable=SC2034
# qwen3-30B-A3B: Qwen3MoeForCausalLM. Written by: python tools/model_args.py CONFIG --script qwen3-30B-A3B --knob rotary-base
# MODEL_ARGS_ROTARY_BASE, when set, replaces the value of --rotary-base.
MODEL_ARGS=(
   # decoder
   --num-layers 48
   --hidden-size 2048
   --ffn-hidden-size 6144
   --vocab-size 151936
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 4
   --kv-channels 128
   --qk-layernorm
   # positions
   --position-embedding-type rope
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --rotary-percent 1.0
   # experts
   --num-experts 128
   --moe-layer-freq "[1]*48"
   --moe-ffn-hidden-size 768
   --moe-grouped-gemm
   --moe-permute-fusion
   --moe-token-dispatcher-type alltoall
   --moe-token-drop-policy probs
   # router
   --moe-router-topk 8
   --moe-router-score-function softmax
   --moe-router-dtype fp32
   --moe-aux-loss-coeff 0
)
