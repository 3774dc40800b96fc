# shellcheck shell=bash disable=SC2034
# qwen3-0.6B: Qwen3ForCausalLM. Written by: python tools/model_args.py CONFIG --script qwen3-0.6B
MODEL_ARGS=(
   # decoder
   --num-layers 28
   --hidden-size 1024
   --ffn-hidden-size 3072
   --vocab-size 151936
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   # positions
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
