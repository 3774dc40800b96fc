# shellcheck shell=bash disable=SC2034
# qwen3.5-35B-A3B: Qwen3_5MoeForConditionalGeneration. Written by: python tools/model_args.py CONFIG --script qwen3.5-35B-A3B
MODEL_ARGS=(
   # layers of our own
   --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
   # decoder
   --num-layers 40
   --hidden-size 2048
   --ffn-hidden-size 512
   --vocab-size 248320
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --apply-layernorm-1p
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 2
   --kv-channels 256
   --qk-layernorm
   --attention-output-gate
   # gated delta net
   --linear-attention-freq 4
   --linear-conv-kernel-dim 4
   --linear-key-head-dim 128
   --linear-value-head-dim 128
   --linear-num-key-heads 16
   --linear-num-value-heads 32
   # positions
   --position-embedding-type rope
   --rotary-base 10000000
   --rotary-percent 0.25
   # experts
   --num-experts 256
   --moe-layer-freq "[1]*40"
   --moe-ffn-hidden-size 512
   --moe-shared-expert-intermediate-size 512
   --moe-shared-expert-gate
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
