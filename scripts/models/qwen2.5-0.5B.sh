# shellcheck shell=bash disable=SC2034
# qwen2.5-0.5B: Qwen2ForCausalLM. Written by: python tools/model_args.py CONFIG --script qwen2.5-0.5B
MODEL_ARGS=(
   # decoder
   --num-layers 24
   --hidden-size 896
   --ffn-hidden-size 4864
   --vocab-size 151936
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 14
   --group-query-attention
   --num-query-groups 2
   --kv-channels 64
   --add-qkv-bias
   # positions
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
