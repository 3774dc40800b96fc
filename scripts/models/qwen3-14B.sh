# shellcheck shell=bash disable=SC2034
# qwen3-14B: Qwen3ForCausalLM. Written by: python tools/model_args.py CONFIG --script qwen3-14B
MODEL_ARGS=(
   # decoder
   --num-layers 40
   --hidden-size 5120
   --ffn-hidden-size 17408
   --vocab-size 151936
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 40
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   # positions
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
