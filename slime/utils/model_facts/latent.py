"""Rows of multi-latent attention and of its sparse variant (DSA), which DeepSeek, Kimi and newer GLM models share."""

from slime.utils.layout.errors import LayoutError
from slime.utils.layout.index_sharing import index_sharing_of_config
from slime.utils.model_facts.config import Config, ConfigError
from slime.utils.model_facts.facts import Fact, Rule, always, field, made, maybe, recipe

LATENT_ATTENTION = (
    always("--multi-latent-attention"),
    field("--num-attention-heads", "num_attention_heads"),
    maybe("--q-lora-rank", "q_lora_rank"),  # small models project queries directly
    field("--kv-lora-rank", "kv_lora_rank"),
    field("--qk-head-dim", "qk_nope_head_dim"),
    made("--qk-pos-emb-head-dim", lambda config: _rotated(config)),
    field("--v-head-dim", "v_head_dim"),
    field("--kv-channels", "qk_nope_head_dim"),  # unused by MLA; otherwise Megatron would put hidden_size / heads
    always("--qk-layernorm"),
    recipe("--no-rope-fusion"),
)


LATENT_RULES = (
    Rule("attention_bias", False, "--disable-bias-linear has none, and latent attention reads no --add-qkv-bias"),
    Rule("rope_interleave", True, "Megatron's latent attention rotates neighbouring pairs"),
)


def _rotated(config: Config) -> int:
    """Rotated dimensions of a head. Some versions of transformers save head_dim in their place: qk_head_dim tells."""
    plain, rotated, whole = config.need("qk_nope_head_dim"), config.need("qk_rope_head_dim"), config.get("qk_head_dim")
    if whole is not None and whole != plain + rotated:
        says = f"is {rotated}, but qk_head_dim {whole} - qk_nope_head_dim {plain} = {whole - plain}"
        raise config.error("qk_rope_head_dim", says)
    return rotated


def sparse_attention(*, rope_interleaved: bool) -> tuple[Fact, ...]:
    """The indexer of DSA. rope_interleaved: what the family means when indexer_rope_interleave is not stated.

    The key norm's epsilon is fixed in these models (transformers: LayerNorm(index_head_dim, eps=1e-6)), apart from
    rms_norm_eps.
    """
    return (
        always("--experimental-attention-variant", "dsa"),
        field("--dsa-indexer-n-heads", "index_n_heads"),
        field("--dsa-indexer-head-dim", "index_head_dim"),
        field("--dsa-indexer-topk", "index_topk"),
        made("--dsa-indexer-topk-freq", lambda config: _schedule(config)[0]),
        made("--dsa-indexer-skip-topk-offset", lambda config: _schedule(config)[1]),
        made(
            "--dsa-indexer-rope-interleaved",
            lambda c: c.get("indexer_rope_interleave", bool, default=rope_interleaved),
        ),
        always("--dsa-indexer-k-norm-epsilon", 1e-6),
        recipe("--enable-experimental"),
        recipe("--allgather-cp"),
    )


def _schedule(config: Config) -> tuple[int, int]:
    """(frequency, offset) of the layers that compute top-k indices, in Megatron's terms: layer l (1-based) reuses
    those of a layer before it iff max(l - max(offset, 1), 0) % frequency != 0. (1, 0) without sharing.

    Raises ConfigError when indexer_types, frequency and offset, and pattern disagree, or follow no such schedule.
    """
    try:
        sharing = index_sharing_of_config(dict(config.fields))
    except LayoutError as error:
        raise ConfigError(f"{config.source}: {error}") from error
    layers = config.need("num_hidden_layers")
    computes = (True,) * layers if sharing is None else sharing.computes
    if all(computes):
        return 1, 0
    if config.get("index_topk_freq") is not None:
        return config.need("index_topk_freq"), config.need("index_skip_topk_offset")
    for frequency in range(2, layers + 1):
        for offset in range(1, layers + 1):
            if all(computes[i] == (max(i + 1 - offset, 0) % frequency == 0) for i in range(layers)):
                return frequency, offset
    raise config.error(
        "indexer_types", "follows no (index_topk_freq, index_skip_topk_offset), which is all Megatron has"
    )
