# shellcheck shell=bash disable=SC2034
# quickstart: Qwen3ForCausalLM. Written by: python tools/model_args.py CONFIG --script quickstart
MODEL_ARGS=(
   # decoder
   --num-layers 4
   --hidden-size 128
   --ffn-hidden-size 384
   --vocab-size 52
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 4
   --group-query-attention
   --num-query-groups 2
   --kv-channels 32
   --qk-layernorm
   # positions
   --use-rotary-position-embeddings
   --rotary-base 10000
)
