# shellcheck shell=bash disable=SC2034
# qwen3-1.7B: Qwen3ForCausalLM. Written by: python tools/model_args.py CONFIG --script qwen3-1.7B --knob rotary-base
# MODEL_ARGS_ROTARY_BASE, when set, replaces the value of --rotary-base.
MODEL_ARGS=(
   # decoder
   --num-layers 28
   --hidden-size 2048
   --ffn-hidden-size 6144
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
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
)
