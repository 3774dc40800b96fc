# shellcheck shell=bash disable=SC2034
# glm5.2-744B-A40B: GlmMoeDsaForCausalLM. Written by: python tools/model_args.py CONFIG --script glm5.2-744B-A40B
MODEL_ARGS=(
   # layers of our own
   --spec slime_plugins.models.glm5.glm5 get_glm5_spec
   --enable-experimental
   # decoder
   --num-layers 78
   --hidden-size 6144
   --ffn-hidden-size 12288
   --vocab-size 154880
   --make-vocab-size-divisible-by 16
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --swiglu
   --disable-bias-linear
   # attention
   --multi-latent-attention
   --num-attention-heads 64
   --kv-channels 192
   --q-lora-rank 2048
   --kv-lora-rank 512
   --qk-head-dim 192
   --qk-pos-emb-head-dim 64
   --v-head-dim 256
   --qk-layernorm
   # sparse attention: the indexer, and which layers reuse its choice
   --experimental-attention-variant dsa
   --dsa-indexer-n-heads 32
   --dsa-indexer-head-dim 128
   --dsa-indexer-topk 2048
   --dsa-indexer-topk-freq 4
   --dsa-indexer-skip-topk-offset 3
   --dsa-indexer-rope-interleaved
   --dsa-indexer-k-norm-epsilon 1e-6
   --allgather-cp
   # positions
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 8000000
   --no-rope-fusion
   # experts
   --num-experts 256
   --moe-layer-freq "[0]*3+[1]*75"
   --moe-ffn-hidden-size 2048
   --moe-shared-expert-intermediate-size 2048
   --moe-grouped-gemm
   --moe-permute-fusion
   --moe-token-dispatcher-type alltoall
   # router
   --moe-router-topk 8
   --moe-router-topk-scaling-factor 2.5
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
)
