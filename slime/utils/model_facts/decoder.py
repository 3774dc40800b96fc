"""Rows that most families share: the decoder's sizes, grouped-query attention, experts and their router."""

from collections.abc import Callable

from slime.utils.model_facts.config import Config
from slime.utils.model_facts.facts import Fact, Rule, Value, always, field, made, recipe

SILU = Rule("hidden_act", "silu", "--swiglu is SiLU")
NO_ATTENTION_BIAS = Rule("attention_bias", False, "--add-qkv-bias has no bias in the output projection")
FULL_ATTENTION = (
    Rule("use_sliding_window", False, "attention sees the whole sequence"),
    Rule("layer_types", "full_attention", "attention sees the whole sequence"),
)


def decoder(ffn: Fact) -> tuple[Fact, ...]:
    """Sizes and norms of the decoder; `ffn` is the row of the dense MLP's width."""
    return (
        field("--num-layers", "num_hidden_layers"),
        field("--hidden-size", "hidden_size"),
        ffn,
        field("--vocab-size", "vocab_size"),
        made("--untie-embeddings-and-output-weights", lambda c: not c.get("tie_word_embeddings", bool, False)),
        always("--normalization", "RMSNorm"),
        field("--norm-epsilon", "rms_norm_eps", float),
        always("--swiglu"),
        always("--disable-bias-linear"),
    )


DENSE_FFN = field("--ffn-hidden-size", "intermediate_size")

GROUPED_QUERY = (
    field("--num-attention-heads", "num_attention_heads"),
    always("--group-query-attention"),
    made("--num-query-groups", lambda c: _query_groups(c)),
    made("--kv-channels", lambda c: _head_dim(c)),
)


def _query_groups(config: Config) -> int:
    heads, groups = config.need("num_attention_heads"), config.need("num_key_value_heads")
    if groups < 1 or heads % groups:
        raise config.error("num_key_value_heads", f"is {groups}, which does not divide {heads} attention heads")
    return groups


def _head_dim(config: Config) -> int:
    """head_dim, which is free; a config without it means hidden_size / num_attention_heads."""
    hidden, heads = config.need("hidden_size"), config.need("num_attention_heads")
    stated = config.get("head_dim")
    if stated is None and hidden % heads:
        raise config.error("head_dim", f"is missing, and {heads} heads do not divide hidden_size {hidden}")
    return stated or hidden // heads


# Kernels and communication of experts, the same for every model.
EXPERT_RECIPE = (
    recipe("--moe-grouped-gemm"),
    recipe("--moe-permute-fusion"),
    recipe("--moe-token-dispatcher-type", "alltoall"),
    recipe("--moe-router-dtype", "fp32"),
    recipe("--moe-aux-loss-coeff", 0),
)


def sigmoid_router(balancing: str = "seq_aux_loss") -> tuple[Fact, ...]:
    """Sigmoid scores normalised over the chosen experts, chosen with a bias that RL leaves alone (update rate 0)."""
    return (
        always("--moe-router-pre-softmax"),
        always("--moe-router-score-function", "sigmoid"),
        always("--moe-router-enable-expert-bias"),
        recipe("--moe-router-bias-update-rate", 0),
        recipe("--moe-router-load-balancing-type", balancing),
    )


# Megatron divides sigmoid scores by their sum over the chosen experts, always.
SIGMOID_RULES = (
    Rule("scoring_func", "sigmoid", "the router of this family is --moe-router-score-function sigmoid"),
    Rule("norm_topk_prob", True, "Megatron normalises the sigmoid scores of the chosen experts"),
    Rule("topk_method", "noaux_tc", "experts are chosen by score plus bias, without an auxiliary loss"),
)

# Softmax over the chosen experts (norm_topk_prob), or over all of them before the choice.
SOFTMAX_ROUTER = (
    always("--moe-router-score-function", "softmax"),
    made("--moe-router-pre-softmax", lambda c: not c.get("norm_topk_prob", bool, True)),
    recipe("--moe-token-drop-policy", "probs"),
)


def shared_experts(config: Config) -> int | None:
    """Width of all shared experts together, which Megatron builds as one MLP."""
    return config.get("n_shared_experts", default=0) * config.need("moe_intermediate_size") or None


def router_groups(*, always_shown: bool) -> tuple[Fact, ...]:
    """Group-limited routing: experts come from the topk_group best of n_group groups. One group is no limit."""

    def of(key: str) -> Callable[[Config], int | None]:
        def value(config: Config) -> int | None:
            groups, chosen = config.get("n_group", default=1), config.get("topk_group", default=1)
            if not 1 <= chosen <= groups:
                raise config.error("topk_group", f"is {chosen}, not between 1 and n_group {groups}")
            return {"n_group": groups, "topk_group": chosen}[key] if always_shown or groups > 1 else None

        return value

    return made("--moe-router-num-groups", of("n_group")), made("--moe-router-group-topk", of("topk_group"))


def scaling_factor(config: Config) -> float | None:
    """The factor on the routing weights; 1 is none."""
    factor = config.get("routed_scaling_factor", float, 1.0)
    return factor if factor != 1.0 else None


def layer_pattern(pattern: list[bool] | tuple[bool, ...]) -> str:
    """Megatron's expression for a 0/1 list over the layers: (False, True, True) -> "[0]*1+[1]*2"."""
    runs: list[tuple[bool, int]] = []
    for flag in pattern:
        if runs and runs[-1][0] == flag:
            runs[-1] = (flag, runs[-1][1] + 1)
        else:
            runs.append((flag, 1))
    return "+".join(f"[{int(flag)}]*{count}" for flag, count in runs)


def experts_after_dense(config: Config) -> Value:
    """--moe-layer-freq of DeepSeek-like models: dense layers first, then experts in every moe_layer_freq-th layer.

    mlp_layer_types, where stated, names each layer's kind and must agree.
    """
    layers, dense = config.need("num_hidden_layers"), config.get("first_k_dense_replace")
    types = config.get("mlp_layer_types", list)
    if types is None and dense is None:
        raise config.error("first_k_dense_replace", f"is missing, and {config.model_type} models need it")
    every = _step(config, "moe_layer_freq")
    pattern = [dense is not None and i >= dense and i % every == 0 for i in range(layers)]
    if types is not None:
        stated = [_sparse(config, kind) for kind in types]
        if len(stated) != layers:
            raise config.error("mlp_layer_types", f"has {len(stated)} entries for {layers} layers")
        if dense is not None and stated != pattern:
            layer = next(i for i in range(layers) if stated[i] != pattern[i])
            says = f"has {types[layer]!r} for layer {layer}, first_k_dense_replace {dense} says otherwise"
            raise config.error("mlp_layer_types", says)
        pattern = stated
    return layer_pattern(pattern)


def _sparse(config: Config, kind: object) -> bool:
    if kind not in ("dense", "sparse"):
        raise config.error("mlp_layer_types", f"has {kind!r}; the kinds are dense and sparse")
    return kind == "sparse"


def _step(config: Config, key: str) -> int:
    step = config.get(key, default=1)
    if step < 1:
        raise config.error(key, f"is {step}, must be at least 1")
    return step


def experts_by_step(config: Config) -> Value:
    """--moe-layer-freq of Qwen models: experts in every decoder_sparse_step-th layer but those of mlp_only_layers."""
    step, without = _step(config, "decoder_sparse_step"), config.get("mlp_only_layers", list, [])
    layers = range(config.need("num_hidden_layers"))
    return layer_pattern([(i + 1) % step == 0 and i not in without for i in layers])
