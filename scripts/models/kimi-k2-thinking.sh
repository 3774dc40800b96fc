# shellcheck shell=bash disable=SC2034
# kimi-k2-thinking: DeepseekV3ForCausalLM. Written by: python tools/model_args.py CONFIG --script kimi-k2-thinking
MODEL_ARGS=(
   # decoder
   --num-layers 61
   --hidden-size 7168
   --ffn-hidden-size 18432
   --vocab-size 163840
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --swiglu
   --disable-bias-linear
   # attention
   --multi-latent-attention
   --num-attention-heads 64
   --kv-channels 128
   --q-lora-rank 1536
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --qk-layernorm
   --attention-softmax-in-fp32
   # positions
   --position-embedding-type rope
   --rotary-base 50000
   --rotary-scaling-factor 64.0
   --mscale 1.0
   --mscale-all-dim 1.0
   --no-rope-fusion
   # experts
   --num-experts 384
   --moe-layer-freq "[0]*1+[1]*60"
   --moe-ffn-hidden-size 2048
   --moe-shared-expert-intermediate-size 2048
   --moe-grouped-gemm
   --moe-permute-fusion
   --moe-token-dispatcher-type alltoall
   # router
   --moe-router-topk 8
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-router-topk-scaling-factor 2.827
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
)
