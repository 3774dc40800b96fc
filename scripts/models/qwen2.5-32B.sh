# shellcheck shell=bash disable=SC2034
# qwen2.5-32B: Qwen2ForCausalLM. Written by: python tools/model_args.py CONFIG --script qwen2.5-32B
MODEL_ARGS=(
   # decoder
   --num-layers 64
   --hidden-size 5120
   --ffn-hidden-size 27648
   --vocab-size 152064
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 40
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --add-qkv-bias
   # positions
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
