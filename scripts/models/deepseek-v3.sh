# shellcheck shell=bash disable=SC2034
# deepseek-v3: DeepseekV3ForCausalLM. Written by: python tools/model_args.py CONFIG --script deepseek-v3 --knob num-layers
# MODEL_ARGS_NUM_LAYERS, when set, replaces the value of --num-layers.
MODEL_ARGS=(
   # decoder
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-61}"
   --hidden-size 7168
   --ffn-hidden-size 18432
   --vocab-size 129280
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --multi-latent-attention
   --num-attention-heads 128
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
   --rotary-base 10000
   --rotary-scaling-factor 40
   --mscale 1.0
   --mscale-all-dim 1.0
   --no-rope-fusion
   # experts
   --num-experts 256
   --moe-layer-freq "[0]*3+[1]*$((${MODEL_ARGS_NUM_LAYERS:-61} - 3))"
   --moe-ffn-hidden-size 2048
   --moe-shared-expert-intermediate-size 2048
   --moe-grouped-gemm
   --moe-permute-fusion
   --moe-token-dispatcher-type alltoall
   # router
   --moe-router-topk 8
   --moe-router-num-groups 8
   --moe-router-group-topk 4
   --moe-router-topk-scaling-factor 2.5
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
)
