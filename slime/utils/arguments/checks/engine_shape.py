"""How an SGLang engine cuts the model: the sizes of its groups, and the widths that have to divide by them."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.utils.arguments.checks.common import first_of, head_dim, kv_groups, model_config

# Ways of exchanging tokens that put every expert-parallel rank on a tensor-parallel one.
SPANNING_BACKENDS = ("megamoe", "deepep", "mooncake", "nixl", "ascend_fuseep", "flashinfer", "mori", "pplx")


@dataclass(frozen=True)
class EngineShape:
    """Ranks of one pipeline stage of an engine. tp: all of them; attention_tp: those that share one token's attention;
    dense_tp: those that share a dense MLP; ep and expert_tp: those that spread experts, and share one.
    """

    tp: int
    attention_tp: int
    dense_tp: int
    ep: int
    expert_tp: int

    @classmethod
    def of(cls, a: Namespace) -> "EngineShape":
        """From the arguments; sizes that do not divide are rounded down, and reported by the checks of the sizes."""
        tp = a.rollout_num_gpus_per_engine // max(1, a.sglang_pp_size)
        dp = a.sglang_dp_size if a.sglang_enable_dp_attention else 1
        ep = tp if a.sglang_moe_a2a_backend in SPANNING_BACKENDS else a.sglang_ep_size
        return cls(
            tp=max(1, tp),
            attention_tp=max(1, tp // max(1, dp * a.sglang_attn_cp_size)),
            dense_tp=1 if a.sglang_moe_dense_tp_size == 1 else max(1, tp),
            ep=max(1, ep),
            expert_tp=max(1, tp // max(1, ep * a.sglang_moe_dp_size)),
        )


@dataclass(frozen=True)
class EngineModel:
    """The model that the engines serve: config.json's, or the trainer's where that is not on this machine."""

    heads: int | None
    groups: int | None
    head_dim: int | None
    experts: int | None
    expert_width: int | None
    dense_width: int | None
    latent: tuple[int, int, int] | None  # width of a query head, of a key head without rotation, of a value head
    block: tuple[int, int] | None  # output and input side of an FP8 scaling block of the checkpoint
    unquantised: tuple[str, ...]

    @classmethod
    def of(cls, a: Namespace) -> "EngineModel":
        """Reads a.hf_config, else Megatron's arguments, which cannot tell of a quantised checkpoint."""
        config = model_config(a)
        if not config:
            return cls(
                heads=a.num_attention_heads,
                groups=None if a.multi_latent_attention else kv_groups(a),
                head_dim=head_dim(a),
                experts=a.num_experts,
                expert_width=a.moe_ffn_hidden_size if a.num_experts else None,
                dense_width=a.ffn_hidden_size,
                latent=_latent(a.qk_head_dim, a.qk_pos_emb_head_dim, a.v_head_dim)
                if a.multi_latent_attention
                else None,
                block=None,
                unquantised=(),
            )
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        experts = first_of(config, "n_routed_experts", "num_experts", "num_local_experts")
        all_sparse = experts and not config.get("first_k_dense_replace") and not config.get("mlp_only_layers")
        nope = config.get("qk_nope_head_dim")
        latent = None
        if config.get("kv_lora_rank") and nope:
            whole = config.get("qk_head_dim")
            rope = whole - nope if whole else config.get("qk_rope_head_dim") or 0
            latent = _latent(nope, rope, config.get("v_head_dim") or nope)
        quantisation = config.get("quantization_config") or {}
        block = quantisation.get("weight_block_size") if quantisation.get("quant_method") == "fp8" else None
        kept = quantisation.get("modules_to_not_convert") or quantisation.get("ignored_layers")
        return cls(
            heads=heads,
            groups=None if latent else first_of(config, "num_key_value_heads") or heads,
            head_dim=first_of(config, "head_dim") or (hidden // heads if hidden and heads else None),
            experts=experts,
            expert_width=config.get("moe_intermediate_size") or (config.get("intermediate_size") if experts else None),
            dense_width=None if all_sparse else config.get("intermediate_size"),
            latent=latent,
            block=tuple(block) if _is_block(block) else None,
            unquantised=tuple(map(str, kept)) if isinstance(kept, list) else (),
        )

    def attention_widths(self, ranks: int) -> Iterator[tuple[str, int, int]]:
        """(what, width over `ranks` ranks, FP8 block of that side) of the projections that attention splits."""
        if not self.block or not self.heads or self._kept("self_attn", "q_proj", "o_proj"):
            return
        out, inner = self.block
        if self.latent:
            query, key, value = self.latent
            yield "queries", self.heads * query, out
            yield "keys and values", self.heads * (key + value), out
            yield "attention output", self.heads * value, inner
        elif self.head_dim:
            yield "queries", self.heads * self.head_dim, out
            yield "keys", max(self.groups or self.heads, ranks) * self.head_dim, out
            yield "attention output", self.heads * self.head_dim, inner

    def quantises_experts(self) -> bool:
        """Whether the routed experts come in FP8 blocks."""
        return bool(self.block and self.expert_width) and not self._kept("mlp.experts")

    def quantises_dense(self) -> bool:
        """Whether the dense MLPs come in FP8 blocks."""
        return bool(self.block and self.dense_width) and not self._kept("mlp.down_proj", "mlp.gate_proj")

    def _kept(self, *words: str) -> bool:
        return any(word in name for name in self.unquantised for word in words)


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)


def _latent(nope: int, rope: int, value: int) -> tuple[int, int, int]:
    return nope + rope, nope, value
