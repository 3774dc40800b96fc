# The tiny Qwen3 of tools/make_quickstart.py (0.8 M parameters).
MODEL_ARGS=(
   --num-layers 4
   --hidden-size 128
   --ffn-hidden-size 384
   --num-attention-heads 4
   --group-query-attention
   --num-query-groups 2
   --kv-channels 32
   --qk-layernorm
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --swiglu
   --disable-bias-linear
   --untie-embeddings-and-output-weights
   --position-embedding-type rope
   --use-rotary-position-embeddings
   --rotary-base 10000
   --vocab-size 52
)
