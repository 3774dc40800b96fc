# shellcheck shell=bash disable=SC2034
# glm4.5-106B-A12B: Glm4MoeForCausalLM. Written by: python tools/model_args.py CONFIG --script glm4.5-106B-A12B
MODEL_ARGS=(
   # decoder
   --num-layers 46
   --hidden-size 4096
   --ffn-hidden-size 10944
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 96
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --add-qkv-bias
   # positions
   --position-embedding-type rope
   --rotary-base 1000000
   --rotary-percent 0.5
   # experts
   --num-experts 128
   --moe-layer-freq "[0]*1+[1]*45"
   --moe-ffn-hidden-size 1408
   --moe-shared-expert-intermediate-size 1408
   --moe-grouped-gemm
   --moe-permute-fusion
   --moe-token-dispatcher-type alltoall
   # router
   --moe-router-topk 8
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
)
