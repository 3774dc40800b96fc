# shellcheck shell=bash disable=SC2034
# minimax-m2: MiniMaxM2ForCausalLM. Written by: python tools/model_args.py CONFIG --script minimax-m2
MODEL_ARGS=(
   # layers of our own
   --spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec
   # decoder
   --num-layers 62
   --hidden-size 3072
   --ffn-hidden-size 1536
   --vocab-size 200064
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 48
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   --attention-softmax-in-fp32
   # positions
   --position-embedding-type rope
   --rotary-base 5000000
   --rotary-percent 0.5
   --no-rope-fusion
   # experts
   --num-experts 256
   --moe-layer-freq "[1]*62"
   --moe-ffn-hidden-size 1536
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
   --moe-router-load-balancing-type none
   --moe-aux-loss-coeff 0
)
