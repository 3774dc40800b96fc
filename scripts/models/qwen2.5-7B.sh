# shellcheck shell=bash disable=SC2034
# qwen2.5-7B: Qwen2ForCausalLM. Written by: python tools/model_args.py CONFIG --script qwen2.5-7B
MODEL_ARGS=(
   # decoder
   --num-layers 28
   --hidden-size 3584
   --ffn-hidden-size 18944
   --vocab-size 152064
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 28
   --group-query-attention
   --num-query-groups 4
   --kv-channels 128
   --add-qkv-bias
   # positions
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
