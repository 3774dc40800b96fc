"""Core attention for megatron-core's layer specs: packed (thd) or padded (sbhd) input, MLA head sizes, CP.

Takes the place of TEDotProductAttention on every device. Half precision on CUDA goes through one variable-length
flash-attention call; everything else through torch's SDPA, with sequences of like length in one call.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.varlen import varlen_attn

from slime.backends.megatron_utils.torch_te.attention_plan import Group, Segment, groups_of, segments_of, zigzag_rows

MASK_TYPES = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.no_mask, AttnMaskType.padding)
MAX_FLASH_HEAD_DIM = 256


class PackedAttention(MegatronModule):
    """softmax(scale * q k^T + mask) v per sequence, grouped-query, causal unless attn_mask_type says otherwise.

    Packed input: query [t, heads, d], key [t, kv_heads, d], value [t, kv_heads, dv], cu_seqlens of the whole (not
    the local) sequences -> [t, heads * dv]. Padded input: [s, b, heads, d] .. -> [s, b, heads * dv].

    With CP the queries stay local and keys and values are gathered over the group (backward: reduce-scatter), in
    zigzag layout. ValueError for options that only Transformer Engine has: sliding window, attention sinks, bias,
    arbitrary masks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ):
        super().__init__(config=config)
        _check_supported(config, attention_type)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(config.kv_channels if k_channels is None else k_channels)
        self.softmax_scale = softmax_scale
        self.cp_group = None
        if config.context_parallel_size > 1:
            self.cp_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        self.current_max_attn_logits = None  # read by mcore's qk-clip, which is refused above

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """See the class. attention_mask is not read: the mask follows from the mask type and the packing."""
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        causal = self._is_causal(attn_mask_type or self.attn_mask_type, packed)
        if attention_bias is not None:
            raise ValueError("an attention bias needs transformer_engine")
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        cp_rank = 0 if self.cp_group is None else self.cp_group.rank()
        if cp_size > 1 and not causal:
            raise ValueError("context parallelism needs causal attention")
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
            plan = _plan_of(packed_seq_params, query, cp_size, cp_rank, causal)
        else:
            plan = Plan((0, query.size(0) * cp_size), cp_size, cp_rank, causal, query.device)
        if cp_size > 1:
            both = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=self.cp_group)
            key, value = both.split((key.size(-1), value.size(-1)), dim=-1)
        dropout = self.dropout if self.training else 0.0
        if _flash_can(query, key, value, dropout):
            out = _flash(plan, query, key, value, self.softmax_scale)
        else:
            out = _sdpa(plan, query, key, value, self.softmax_scale, dropout)
        out = out.flatten(2)
        return out.squeeze(1) if packed else out

    def _is_causal(self, mask_type: AttnMaskType, packed: bool) -> bool:
        padding = mask_type in (AttnMaskType.padding, AttnMaskType.padding_causal)
        if mask_type not in MASK_TYPES or (padding and not packed):
            raise ValueError(f"attention mask {mask_type.name} of an unpacked batch needs transformer_engine: pack it")
        return mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)


class Plan:
    """The index tensors of one packed row on one CP rank, each made at first use and kept for the other layers."""

    def __init__(self, cu_seqlens: tuple[int, ...], cp_size: int, cp_rank: int, causal: bool, device: torch.device):
        self.segments: list[Segment] = segments_of(cu_seqlens, cp_size, cp_rank)
        self.causal, self.device = causal, device
        self._key_rows = zigzag_rows(cu_seqlens, cp_size) if cp_size > 1 else None
        self._groups: tuple[list[Group], torch.Tensor] | None = None
        self._starts: list[int] = []
        self._flash: tuple[torch.Tensor, torch.Tensor, int, int, torch.Tensor | None] | None = None

    @property
    def in_order(self) -> bool:
        """Whether keys lie in sequence order (no CP)."""
        return self._key_rows is None

    def groups(self) -> tuple[list[Group], torch.Tensor]:
        """Groups and [t] int64: where in the concatenation of the groups' flattened outputs each local row lies."""
        if self._groups is None:
            groups = groups_of(self.segments, self._key_rows, self.causal)
            pairs = [(group.query_rows.flatten(), group.real.flatten()) for group in groups]
            rows, real = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            place = torch.empty(int(real.sum()), dtype=torch.int64)
            place[rows[real]] = real.nonzero().squeeze(1)
            self._starts = [int(group.query_rows[0, 0]) for group in groups]
            self._groups = [group.to(self.device) for group in groups], place.to(self.device)
        return self._groups

    def group_starts(self) -> list[int]:
        """First local query row of each group."""
        self.groups()
        return self._starts

    def flash(self) -> tuple[torch.Tensor, torch.Tensor, int, int, torch.Tensor | None]:
        """cu_seqlens of queries and keys [n + 1] int32, their longest lengths, key rows (None: as they lie)."""
        if self._flash is None:
            queries = torch.tensor([0] + [s.length for s in self.segments])
            keys = torch.tensor([0] + [s.key_length for s in self.segments])
            rows = None
            if self._key_rows is not None:
                rows = torch.cat([self._key_rows[s.key_start : s.key_end] for s in self.segments]).to(self.device)
            cu = [t.cumsum(0).to(torch.int32).to(self.device) for t in (queries, keys)]
            self._flash = (*cu, int(queries.max()), int(keys.max()), rows)
        return self._flash


def _plan_of(params: PackedSeqParams, query: torch.Tensor, cp_size: int, cp_rank: int, causal: bool) -> Plan:
    """The plan of these params, kept on the object: all layers and the recomputation share one device read."""
    if params.local_cp_size is not None:
        raise ValueError("a context-parallel size per micro-batch (hybrid CP) needs transformer_engine")
    cu_seqlens = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    key = (id(cu_seqlens), query.size(0), cp_size, cp_rank, causal, query.device)
    plans = vars(params).setdefault("_attention_plans", {})
    if key not in plans:
        cu = cu_seqlens.tolist()
        total = query.size(0) * cp_size
        if cu[-1] > total:
            raise ValueError(
                f"cu_seqlens end at {cu[-1]}, but only {query.size(0)} x cp {cp_size} = {total} tokens came"
            )
        if cu[-1] < total:  # tokens behind the last sequence attend among themselves
            cu.append(total)
        plans[key] = Plan(tuple(cu), cp_size, cp_rank, causal, query.device)
    return plans[key]


def _check_supported(config: TransformerConfig, attention_type: str) -> None:
    refused = {
        "cross attention": attention_type != "self",
        "a sliding window (--window-size)": config.window_size is not None,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
        "--apply-query-key-layer-scaling": config.apply_query_key_layer_scaling,
        "--qk-clip": config.qk_clip,
        "--log-max-attention-logit": config.log_max_attention_logit,
    }
    for feature, asked in refused.items():
        if asked:
            raise ValueError(f"{feature} needs transformer_engine, which is not importable here")


def _flash_can(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Whether torch's variable-length flash attention takes these [t, 1, heads, d] tensors."""
    dim = query.size(-1)
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.size(1) == 1
        and dropout == 0
        and dim == value.size(-1)
        and dim % 8 == 0
        and dim <= MAX_FLASH_HEAD_DIM
    )


def _flash(plan: Plan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    cu_queries, cu_keys, longest_query, longest_key, key_rows = plan.flash()
    query, key, value = (t.squeeze(1) for t in (query, key, value))
    if key_rows is not None:
        key, value = key.index_select(0, key_rows), value.index_select(0, key_rows)
    window = (-1, 0) if plan.causal else (-1, -1)
    out = varlen_attn(
        query, key, value, cu_queries, cu_keys, longest_query, longest_key, scale=scale, window_size=window
    )
    return out.unsqueeze(1)


def _sdpa(
    plan: Plan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, dropout: float
) -> torch.Tensor:
    """[t, b, heads, d], [T, b, kv_heads, d], [T, b, kv_heads, dv] -> [t, b, heads, dv], one SDPA call a group."""
    gqa = query.size(2) != key.size(2)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q: [n, L, heads, d] -> [n, L, heads, dv]."""
        mask = None
        if plan.causal and q.size(1) != k.size(1):
            mask = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).tril(k.size(1) - q.size(1))
        is_causal = plan.causal and mask is None
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=gqa
        )
        return out.transpose(1, 2)

    if plan.in_order and len(plan.segments) == 1:
        return attend(*(t.transpose(0, 1) for t in (query, key, value))).transpose(0, 1)
    groups, place = plan.groups()
    # Segments that are alone are views of the row; split() hands their gradients back in one piece.
    alone = plan.in_order and any(len(group.query_rows) == 1 for group in groups)
    lengths = [segment.length for segment in plan.segments]
    pieces = [t.transpose(0, 1).split(lengths, dim=1) for t in (query, key, value)] if alone else []
    index = {segment.start: i for i, segment in enumerate(plan.segments)}
    outs = []
    for group, start in zip(groups, plan.group_starts(), strict=True):
        if alone and len(group.query_rows) == 1:
            out = attend(*(piece[index[start]] for piece in pieces)).transpose(0, 1)
        else:
            rows = (group.query_rows, group.key_rows, group.key_rows)
            # [n, L, b, heads, d] -> [n * b, L, heads, d]
            parts = (_take(t, r).transpose(1, 2).flatten(0, 1) for t, r in zip((query, key, value), rows, strict=True))
            out = attend(*parts).unflatten(0, (-1, query.size(1))).transpose(1, 2).flatten(0, 1)
        outs.append(out)
    return torch.cat(outs).index_select(0, place)


def _take(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """t[rows] for t [T, ...] and rows [n, L]; index_select has the much faster backward on the CPU."""
    return t.index_select(0, rows.flatten()).unflatten(0, rows.shape)
