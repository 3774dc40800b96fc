"""DeepSeek sparse attention (DSA) in plain torch: the indexer, and where its keys are kept.

In SGLang 0.5.17 the indexer, its key cache (FP8, pages of 64 tokens) and the attention over chosen tokens are GPU
kernels, and merely asking for the device's capability raises. Here a server's settings (memory pools, page size,
backend) see a model with plain latent attention, while the model keeps SGLang's modules: the indexer and its weights,
which are loaded and updated by name, and the layers that reuse the choice of a layer before them. Put in are

- `Indexer.forward_native`. Keys are not quantised and stand in the slots of the latent cache, so that whatever moves
  there (prefix reuse, chunked prefill, retraction) moves with them. Scores are float32 products of the model's dtype.
- attention over the chosen tokens: `_attention`, which torch_native gets the choice for.

There is no Hadamard rotation: it turns queries and keys alike and leaves their products as they are.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgl_kernel._attention import batch_layout
from sgl_kernel._choice import choose_tokens

# each of these asks is_deepseek_dsa first
_FACTS = ("dsa_layer_skips_topk", "get_dsa_index_head_dim", "get_dsa_index_n_heads", "get_dsa_index_topk")
_probes: list[Callable[[Any], bool]] = []


def fix_config_probe(module: types.ModuleType) -> None:
    """No model is sparse to those who ask from now on; what else there is to know about sparse ones stays true."""
    truly = dict(vars(module))
    for name in _FACTS:
        setattr(module, name, types.FunctionType(truly[name].__code__, truly))
    _probes[:] = [module.is_deepseek_dsa]
    module.is_deepseek_dsa = lambda config: False


def fix_model(module: types.ModuleType) -> None:
    (module.is_deepseek_dsa,) = _probes


def fix_indexer(module: types.ModuleType) -> None:
    indexer = module.Indexer
    init = indexer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # SGLang keeps these in bfloat16 whatever the model has, which would change the choice of a float32 model
        self.weights_proj.weight.data = self.weights_proj.weight.data.to(self.wk.weight.dtype)

    def forward_native(
        self: Any, x: Tensor, q_lora: Tensor, positions: Tensor, forward_batch: Any, layer_id: int
    ) -> Tensor:
        """x: [T, hidden]. q_lora: [T, q_lora_rank], normalised. Returns [T, index_topk] int32 positions or -1."""
        backend, pool = module.get_attn_backend(), module.get_token_to_kv_pool()
        query = self.wq_b(q_lora)[0].view(-1, self.n_heads, self.head_dim)
        key = self.k_norm(self.wk(x)[0]).unsqueeze(1)
        rotated = self.rope_head_dim
        query_rotated, key_rotated = self.rotary_emb(positions, query[..., :rotated], key[..., :rotated])
        query = torch.cat([query_rotated, query[..., rotated:]], dim=-1)
        key = torch.cat([key_rotated, key[..., rotated:]], dim=-1).squeeze(1)
        weights = torch.nn.functional.linear(x.float(), self.weights_proj.weight.float())
        weights = weights * self.n_heads**-0.5 * self.softmax_scale

        keys = index_keys(pool, layer_id, key)
        keys[forward_batch.out_cache_loc] = key
        tables = backend.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        chosen = choose_tokens(query, weights, keys, tables, batch_layout(backend, forward_batch), self.index_topk)
        return module.maybe_capture_indexer_topk(layer_id, chosen)

    indexer.__init__, indexer.forward_native = __init__, forward_native


def index_keys(pool: Any, layer_id: int, like: Tensor) -> Tensor:
    """The index keys of a layer, [slots of the latent cache, D] with D and dtype of `like` [T, D]."""
    caches = vars(pool).setdefault("index_keys", {})
    if layer_id not in caches:
        slots = pool.get_key_buffer(layer_id).shape[0]
        caches[layer_id] = like.new_zeros(slots, like.shape[1])
    return caches[layer_id]
