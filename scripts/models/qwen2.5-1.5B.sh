# shellcheck shell=bash disable=SC2034
# qwen2.5-1.5B: Qwen2ForCausalLM. Written by: python tools/model_args.py CONFIG --script qwen2.5-1.5B --knob rotary-base
# MODEL_ARGS_ROTARY_BASE, when set, replaces the value of --rotary-base.
MODEL_ARGS=(
   # decoder
   --num-layers 28
   --hidden-size 1536
   --ffn-hidden-size 8960
   --vocab-size 151936
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 12
   --group-query-attention
   --num-query-groups 2
   --kv-channels 128
   --add-qkv-bias
   # positions
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
)
