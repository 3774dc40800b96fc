# shellcheck shell=bash disable=SC2034
# glm4.7-30B-A3B: Glm4MoeLiteForCausalLM. Written by: python tools/model_args.py CONFIG --script glm4.7-30B-A3B
MODEL_ARGS=(
   # decoder
   --num-layers 47
   --hidden-size 2048
   --ffn-hidden-size 10240
   --vocab-size 154880
   --make-vocab-size-divisible-by 64
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --swiglu
   --disable-bias-linear
   # attention
   --multi-latent-attention
   --num-attention-heads 20
   --kv-channels 192
   --q-lora-rank 768
   --kv-lora-rank 512
   --qk-head-dim 192
   --qk-pos-emb-head-dim 64
   --v-head-dim 256
   --qk-layernorm
   # positions
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 1000000
   --no-rope-fusion
   # experts
   --num-experts 64
   --moe-layer-freq "[0]*1+[1]*46"
   --moe-ffn-hidden-size 1536
   --moe-shared-expert-intermediate-size 1536
   --moe-grouped-gemm
   --moe-permute-fusion
   --moe-token-dispatcher-type alltoall
   # router
   --moe-router-topk 4
   --moe-router-topk-scaling-factor 1.8
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
)
