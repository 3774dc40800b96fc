# shellcheck shell=bash disable=SC2034
# mimo-7B-rl: MiMoForCausalLM. Written by: python tools/model_args.py CONFIG --script mimo-7B-rl
MODEL_ARGS=(
   # decoder
   --num-layers 36
   --hidden-size 4096
   --ffn-hidden-size 11008
   --vocab-size 151680
   --untie-embeddings-and-output-weights
   --max-position-embeddings 32768
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --swiglu
   --disable-bias-linear
   --mtp-num-layers 1
   # attention
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --add-qkv-bias
   # positions
   --use-rotary-position-embeddings
   --rotary-base 640000
)
