"""Device memory of an SGLang engine: weights, what is left for the cache, and how many tokens that holds.

Follows the sharding of SGLang 0.5.17 as its flags describe it; imports neither torch nor sglang.
"""

import functools
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.plan.memory import GIB, SLEEPING_TRAINER, longest_sample
from slime.plan.parameters import EMBEDDING, OUTPUT_LAYER, Row, layer_rows
from slime.utils.layout.engine_stages import engine_stages
from slime.utils.model_shape import DeltaNet, GroupedQuery, Indexer, Latent, LayerShape, ModelShape

MIB = 2**20
FP8_BLOCK = 128  # one float32 scale for each 128 x 128 block of an fp8 weight, and each 128 numbers of an index key
INT4_GROUP = 32  # one 2-byte scale for each 32 int4 weights
LARGE_GPU = 60 * GIB  # SGLang reserves at least 10 GiB of larger devices
CHUNKED_PREFILL = 8192  # its defaults for a device of 60 GiB or more
GRAPH_BATCH = {False: 256, True: 512}  # largest captured decode batch, by tp >= 4


@dataclass(frozen=True)
class EngineMemory:
    """One engine. Bytes are of its fullest device; tokens and requests are of the whole engine.

    static: the part of the device that weights and cache share (mem_fraction_static). cache: what weights leave of it,
    negative when they do not fit. kv_per_token: of one device, all its layers. state_per_request: recurrent state.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    attention_tp: int
    weights: int
    mem_fraction: float
    static: int
    cache: int
    kv_per_token: int
    state_per_request: int
    tokens: int
    context: int
    requests_at_context: int

    @property
    def fits(self) -> bool:
        """Whether the weights fit and at least one request of full length runs."""
        return self.cache > 0 and self.requests_at_context > 0


@dataclass(frozen=True)
class _Engine:
    """SGLang's sizes that decide the sharding."""

    tp: int
    pp: int
    dp: int
    ep: int
    dp_attention: bool
    dense_tp: int
    dp_lm_head: bool
    all_to_all: bool

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp if self.dp_attention else self.tp

    @property
    def expert_tp(self) -> int:
        return max(self.tp // self.ep, 1)


def engine_memory(
    a: Namespace,
    gpu_memory: int,
    *,
    shape: ModelShape | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> EngineMemory:
    """Memory of an engine of this run. overrides: ServerArgs name -> value, where a topology of engines differs.

    gpu_memory: bytes of a device. Colocated, what a sleeping trainer keeps is taken from it first.
    weights: of the fullest pipeline stage, see `_stage_weights`. cache = mem_fraction_static x memory - weights.
    tokens = cache / kv_per_token, once for every data-parallel attention group. Raises LayoutError for pipeline stages
    that do not add up.
    """
    shape = shape or ModelShape.from_args(a)
    flag = functools.partial(_flag, a, overrides or {})
    engine = _sizes(flag)
    stages = engine_stages(shape.num_layers, engine.pp, getattr(a, "sglang_pp_layer_partition", None))
    draft = [_draft_layer(shape)] if flag("speculative_algorithm") else []
    per_stage = []
    for rank, stage in enumerate(stages):
        layers = [shape.layers[i] for i in stage] + (draft if rank == engine.pp - 1 else [])
        ends = (rank == 0, rank == engine.pp - 1)
        weights = _stage_weights(a, flag, shape, layers, ends, len(draft), engine)
        kv = sum(kv_bytes(layer, engine.attention_tp, flag("kv_cache_dtype"), _width(a)) for layer in layers)
        state = sum(state_bytes(layer, engine.attention_tp, _width(a)) for layer in layers)
        per_stage.append((weights, kv, state))
    weights, kv, state = (max(column) for column in zip(*per_stage, strict=True))
    fraction = flag("mem_fraction_static") or default_mem_fraction(gpu_memory, flag, engine)
    available = gpu_memory - (SLEEPING_TRAINER if a.colocate else 0)
    cache = min(round(fraction * available) - w for w, _, _ in per_stage)
    groups = engine.dp if engine.dp_attention else 1
    context = flag("context_length") or longest_sample(a) or 0
    tokens = max(cache, 0) // kv if kv else 0
    requests = max(cache, 0) // (context * kv + state) if context else 0
    limit = flag("max_running_requests")
    return EngineMemory(
        tp=engine.tp,
        pp=engine.pp,
        dp=engine.dp,
        ep=engine.ep,
        attention_tp=engine.attention_tp,
        weights=weights,
        mem_fraction=fraction,
        static=round(fraction * available),
        cache=cache,
        kv_per_token=kv,
        state_per_request=state,
        tokens=tokens * groups,
        context=context,
        requests_at_context=min(requests * groups, limit) if limit else requests * groups,
    )


def _flag(a: Namespace, overrides: Mapping[str, Any], name: str) -> Any:
    return overrides[name] if name in overrides else getattr(a, f"sglang_{name}", None)


def _sizes(flag: Any) -> _Engine:
    tp, dp = flag("tp_size") or 1, flag("dp_size") or 1
    dense = flag("moe_dense_tp_size")
    a2a = flag("moe_a2a_backend")
    all_to_all = a2a not in (None, "none")
    return _Engine(
        tp=tp,
        pp=flag("pp_size") or 1,
        dp=dp,
        ep=tp if all_to_all else flag("ep_size") or 1,  # an all-to-all backend spreads experts over all ranks
        dp_attention=bool(flag("enable_dp_attention")) and dp > 1,
        dense_tp=dense or tp,
        dp_lm_head=bool(flag("enable_dp_lm_head")),
        all_to_all=all_to_all,
    )


def _width(a: Namespace) -> int:
    return 2 if a.bf16 or a.fp16 else 4


def _stage_weights(
    a: Namespace,
    flag: Any,
    shape: ModelShape,
    layers: list[LayerShape],
    ends: tuple[bool, bool],
    drafts: int,
    engine: _Engine,
) -> int:
    """Bytes of weights on each device of one pipeline stage.

    Attention is split over tp / dp with data-parallel attention, else over tp; routed experts over ep, and the rest of
    tp inside an expert; dense MLPs over moe_dense_tp_size; shared experts over tp, or not at all with an all-to-all
    backend; the embedding like attention, the output matrix over tp, or like attention with enable_dp_lm_head. MLA
    keeps its kv up-projection a second time, as the two absorbed matrices.
    """
    width, quantized = _width(a), weight_bytes(a, flag)
    total = 0.0
    for layer in layers:
        for row in layer_rows(layer, shape.hidden, shape.norm_vectors):
            each = quantized[1 if row.split == "expert" else 0] if _is_quantized(row) else width
            copies = 2 if row.name.endswith("linear_kv_up_proj.weight") else 1
            total += copies * row.elements * row.count / _split(row, engine) * each
    first, last = ends
    table = shape.vocab * shape.hidden * width
    if first:
        total += table / engine.attention_tp
    if last and not (shape.tied and first):
        total += table / (engine.attention_tp if engine.dp_lm_head else engine.tp)
    if drafts and last:  # the draft layer's projection of embedding and hidden state
        total += drafts * 2 * shape.hidden**2 * width
    return round(total)


def _split(row: Row, engine: _Engine) -> int:
    if row.split == "whole":
        return 1
    if row.split == "expert":
        return engine.ep * engine.expert_tp
    if row.name.startswith("self_attention"):
        return engine.attention_tp
    if "shared_experts" in row.name:
        return 1 if engine.all_to_all else engine.tp
    return engine.dense_tp


def _is_quantized(row: Row) -> bool:
    """Matrices are, but not norms, biases, the router, embeddings, and the indexer's head weights."""
    kept = ("router", "gate_weight", "weights_proj", "conv1d", EMBEDDING, OUTPUT_LAYER)
    return ".weight" in row.name and "norm" not in row.name and not any(name in row.name for name in kept)


def weight_bytes(a: Namespace, flag: Any) -> tuple[float, float]:
    """Bytes of a number of (ordinary matrices, routed experts) in the engine, from the checkpoint's quantization.

    fp8: 1 and a float32 scale a 128 x 128 block. int4 (compressed-tensors with 4-bit experts, which is also assumed
    where only the flag is known): experts 0.5 and a 2-byte scale a group of 32, the rest unquantized. Otherwise the
    run's own precision.
    """
    width = _width(a)
    config = (getattr(a, "hf_config", None) or {}).get("quantization_config") or {}
    method = flag("quantization") or config.get("quant_method")
    if method == "fp8":
        each = 1 + 4 / FP8_BLOCK**2
        return each, each
    groups = config.get("config_groups")
    if method == "w4afp8" or method == "compressed-tensors" and (groups is None or "4" in str(groups)):
        return width, 0.5 + 2 / INT4_GROUP
    return width, width


def kv_bytes(layer: LayerShape, attention_tp: int, kv_dtype: str | None, width: int) -> int:
    """Bytes of cache a token of one layer on one device.

    Grouped query: key and value of max(groups / attention_tp, 1) heads. MLA: kv_rank + rope_dim numbers, on every
    device. Sparse attention adds an index key a token, fp8 with a float32 scale for each 128 numbers, in every layer;
    its fp8 cache keeps scales for each 128 numbers and the rope part in 2 bytes. Linear attention: none.
    """
    fp8 = str(kv_dtype or "auto").startswith("fp8")
    each = 1 if fp8 else width
    match layer.attention:
        case GroupedQuery() as g:
            return 2 * max(g.groups // attention_tp, 1) * g.head_dim * each
        case Latent() as m if m.indexer is not None:
            latent = (
                m.kv_rank + m.kv_rank // FP8_BLOCK * 4 + m.rope_dim * 2 if fp8 else each * (m.kv_rank + m.rope_dim)
            )
            return latent + m.indexer.head_dim + m.indexer.head_dim // FP8_BLOCK * 4
        case Latent() as m:
            return each * (m.kv_rank + m.rope_dim)
    return 0


def state_bytes(layer: LayerShape, attention_tp: int, width: int) -> int:
    """Bytes of a request's recurrent state in one layer: key_dim x value_dim float32 a value head, and the last
    conv_kernel - 1 inputs of the convolution."""
    d = layer.attention
    if not isinstance(d, DeltaNet):
        return 0
    state = d.value_heads * d.key_dim * d.value_dim * 4
    window = (2 * d.key_width + d.value_width) * (d.conv_kernel - 1) * width
    return (state + window) // attention_tp


def _draft_layer(shape: ModelShape) -> LayerShape:
    """The layer of multi-token prediction that speculative decoding runs: the model's last, with its own indexer."""
    last = shape.layers[-1]
    attention = last.attention
    if isinstance(attention, Latent) and attention.indexer is not None:
        index = attention.indexer
        attention = Latent(**{**vars(attention), "indexer": Indexer(index.heads, index.head_dim, index.topk, True)})
    return LayerShape(attention, last.mlp, last.post_norms)


def default_mem_fraction(gpu_memory: int, flag: Any, engine: _Engine) -> float:
    """What SGLang chooses for mem_fraction_static when nothing is given, rounded to three digits as there.

    Reserved MiB: 512 + 1.5 a token of a prefill chunk + 1024 (tp pp / 8) + 2 a request of the largest captured batch
    (with data-parallel attention 3 dp more, and 1.5 dp beyond 300); at least 10 GiB on devices above 60 GiB; 2 GiB
    more for DeepEP.
    """
    chunk = flag("chunked_prefill_size") or CHUNKED_PREFILL
    captured = flag("cuda_graph_bs_decode")
    batch = flag("cuda_graph_max_bs_decode") or (max(captured) if captured else GRAPH_BATCH[engine.tp >= 4])
    reserved = 512 + 1.5 * max(chunk, 2048) + 1024 * engine.tp * engine.pp / 8
    if not flag("disable_cuda_graph"):
        reserved += 2 * batch
    if engine.dp_attention:
        reserved += batch * engine.dp * (4.5 if batch > 300 else 3)
    if gpu_memory > LARGE_GPU:
        reserved = max(reserved, 10 * 1024)
    if flag("moe_a2a_backend") == "deepep":
        reserved += 2048
    memory = gpu_memory / MIB
    return round((memory - reserved) / memory, 3)
