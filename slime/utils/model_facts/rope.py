"""Rotary positions as Megatron flags, from either spelling: rope_theta and rope_scaling, or rope_parameters."""

import math
from collections.abc import Mapping
from typing import Any

from slime.utils.model_facts.config import Config
from slime.utils.model_facts.facts import Fact, always, made

# What megatron-core's llama scaling assumes besides the factor (RotaryEmbedding._apply_scaling).
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
# What its YaRN assumes when nothing is said (MLATransformerConfig).
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}


def rotary_base() -> Fact:
    """--rotary-base for a family that knows no scaled positions."""
    return made("--rotary-base", lambda config: _base(config, "default"))


def rotary_percent(default: float, *, always_shown: bool) -> Fact:
    """--rotary-percent: the rotated share of a head. default: what the family means when the config is silent."""

    def of(config: Config) -> float | None:
        share = _share(config, default)
        return share if always_shown or share != 1.0 else None

    return made("--rotary-percent", of)


def llama_rope() -> tuple[Fact, ...]:
    """Plain positions or those of Llama 3.x, whose factor is --rope-scaling-factor.

    --rotary-scaling-factor, its near namesake, is YaRN's and does nothing here.
    """

    def scaled(config: Config) -> bool:
        return _kind(config) == "llama3"

    def factor(config: Config) -> float | None:
        if not scaled(config):
            return None
        parameters = _parameters(config)
        for key, assumed in _LLAMA3.items():
            if parameters.get(key) != assumed:
                raise config.error(f"rope_scaling.{key}", f"is {parameters.get(key)!r}; Megatron assumes {assumed}")
        return _number(config, "factor")

    return (
        made("--rotary-base", lambda config: _base(config, "default", "llama3")),
        made("--use-rope-scaling", scaled),
        made("--rope-scaling-factor", factor),
    )


def yarn_rope(*, spelled_out: bool) -> tuple[Fact, ...]:
    """Positions of multi-latent attention: always YaRN in Megatron, where factor 1 is plain RoPE.

    spelled_out: state the neutral values too. megatron-core gives MLA's beta_fast, beta_slow and original length no
    flags of their own; where a checkpoint departs from its assumptions, the --yarn-* flags of ordinary attention carry
    them, and whoever builds the MLA configuration has to read them from there.
    """

    def yarn(key: str, plain: float, absent: float) -> Any:
        def of(config: Config) -> float | None:
            if _kind(config) == "yarn":
                return _number(config, key, absent)
            return plain if spelled_out else None

        return of

    def unless_assumed(key: str) -> Any:
        def of(config: Config) -> float | None:
            value = _number(config, key, _YARN[key]) if _kind(config) == "yarn" else _YARN[key]
            return value if value != _YARN[key] else None

        return of

    return (
        always("--position-embedding-type", "rope"),
        made("--rotary-base", lambda config: _base(config, "default", "yarn")),
        made("--rotary-scaling-factor", yarn("factor", plain=1, absent=1)),
        made("--mscale", yarn("mscale", plain=1.0, absent=1.0)),
        made("--mscale-all-dim", yarn("mscale_all_dim", plain=1.0, absent=0.0)),
        made("--yarn-beta-fast", unless_assumed("beta_fast")),
        made("--yarn-beta-slow", unless_assumed("beta_slow")),
        made("--yarn-original-max-position-embeddings", unless_assumed("original_max_position_embeddings")),
    )


def _parameters(config: Config) -> Mapping[str, Any]:
    """Everything the config says about rotary positions, by transformers' names. Two statements must agree."""
    found: dict[str, Any] = {}
    loose = {key: config.fields.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for place in (loose, config.get("rope_scaling", dict, {}), config.get("rope_parameters", dict, {})):
        for key, value in place.items():
            key = "rope_type" if key == "type" else key
            if value is None:
                continue
            if isinstance(value, dict):
                raise config.error(f"rope_parameters.{key}", "differs between layers; Megatron has one for all layers")
            if found.setdefault(key, value) != value:
                raise config.error(key, f"is stated twice, as {found[key]!r} and as {value!r}")
    return found


def _kind(config: Config) -> str:
    kind = _parameters(config).get("rope_type", "default")
    return "default" if kind == "mrope" else kind  # rotary sections of images; text has one position


def _number(config: Config, key: str, absent: float | None = None) -> float:
    """A number of the rope parameters in the type the file has it; `absent` when it is silent."""
    value = _parameters(config).get(key, absent)
    if value is None:
        raise config.error(f"rope_scaling.{key}", f"is missing, and rope type {_kind(config)} needs it")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise config.error(f"rope_scaling.{key}", f"is {value!r}, not a number")
    return value


def _base(config: Config, *kinds: str) -> int:
    if _kind(config) not in kinds:
        known = " and ".join(kinds)
        says = f"is {_kind(config)}; {config.model_type} models are trained with {known} positions only"
        raise config.error("rope type", says)
    base = _parameters(config).get("rope_theta")
    if base is None:
        raise config.error("rope_theta", f"is missing (also in rope_parameters), and {config.model_type} needs it")
    if not isinstance(base, int | float) or not math.isfinite(base) or base != int(base):
        raise config.error("rope_theta", f"is {base!r}; Megatron's --rotary-base takes a whole number")
    return int(base)


def _share(config: Config, default: float) -> float:
    """The rotated share of a head: partial_rotary_factor, or rotary_dim of head_dim."""
    share = _parameters(config).get("partial_rotary_factor")
    if share is not None and (not isinstance(share, int | float) or not 0 < share <= 1):
        raise config.error("partial_rotary_factor", f"is {share!r}, not in (0, 1]")
    rotated = config.get("rotary_dim")
    by_size = None if rotated is None else rotated / config.need("head_dim")
    if share is not None and by_size is not None and share != by_size:
        raise config.error("rotary_dim", f"is {rotated} of head_dim, {by_size:g}; partial_rotary_factor is {share:g}")
    return float(next((value for value in (share, by_size) if value is not None), default))
