# shellcheck shell=bash disable=SC2034
# llama3.1-8B-Instruct: LlamaForCausalLM. Written by: python tools/model_args.py CONFIG --script llama3.1-8B-Instruct
MODEL_ARGS=(
   # decoder
   --num-layers 32
   --hidden-size 4096
   --ffn-hidden-size 14336
   --vocab-size 128256
   --untie-embeddings-and-output-weights
   --max-position-embeddings 131072
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --swiglu
   --disable-bias-linear
   # attention
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   # positions
   --use-rotary-position-embeddings
   --rotary-base 500000
   --use-rope-scaling
   --rope-scaling-factor 8.0
)
