# shellcheck shell=bash disable=SC2034
# llama3.2-3B-Instruct: LlamaForCausalLM. Written by: python tools/model_args.py CONFIG --script llama3.2-3B-Instruct
MODEL_ARGS=(
   # decoder
   --num-layers 28
   --hidden-size 3072
   --ffn-hidden-size 8192
   --vocab-size 128256
   --max-position-embeddings 131072
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 24
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   # positions
   --use-rotary-position-embeddings
   --rotary-base 500000
   --use-rope-scaling
   --rope-scaling-factor 32.0
)
