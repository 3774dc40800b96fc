# shellcheck shell=bash disable=SC2034
# qwen2.5-3B: Qwen2ForCausalLM. Written by: python tools/model_args.py CONFIG --script qwen2.5-3B
MODEL_ARGS=(
   # decoder
   --num-layers 36
   --hidden-size 2048
   --ffn-hidden-size 11008
   --vocab-size 151936
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 2
   --kv-channels 128
   --add-qkv-bias
   # positions
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
