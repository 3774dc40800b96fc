# shellcheck shell=bash disable=SC2034
# glm4-32B: Glm4ForCausalLM. Written by: python tools/model_args.py CONFIG --script glm4-32B
MODEL_ARGS=(
   # layers of our own
   --spec slime_plugins.models.glm4 get_glm_spec
   # decoder
   --num-layers 64
   --hidden-size 6144
   --ffn-hidden-size 23040
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --max-position-embeddings 32768
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --post-self-attn-layernorm
   --post-mlp-layernorm
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 48
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   # positions
   --use-rotary-position-embeddings
   --rotary-base 10000
   --rotary-percent 0.5
   --rotary-interleaved
   --no-rope-fusion
)
