"""Model arguments as a command line has them: tokens, and the bash array of scripts/models/*.sh with its headings."""

import re
from collections.abc import Mapping, Sequence

from slime.utils.model_facts.facts import Value

# The order in which a script shows the flags, under these headings.
SECTIONS: dict[str, tuple[str, ...]] = {
    "layers of our own": ("--spec", "--enable-experimental"),
    "decoder": (
        "--num-layers",
        "--hidden-size",
        "--ffn-hidden-size",
        "--vocab-size",
        "--make-vocab-size-divisible-by",
        "--untie-embeddings-and-output-weights",
        "--max-position-embeddings",
        "--normalization",
        "--norm-epsilon",
        "--apply-layernorm-1p",
        "--post-self-attn-layernorm",
        "--post-mlp-layernorm",
        "--swiglu",
        "--disable-bias-linear",
        "--mtp-num-layers",
    ),
    "attention": (
        "--multi-latent-attention",
        "--num-attention-heads",
        "--group-query-attention",
        "--num-query-groups",
        "--kv-channels",
        "--q-lora-rank",
        "--kv-lora-rank",
        "--qk-head-dim",
        "--qk-pos-emb-head-dim",
        "--v-head-dim",
        "--qk-layernorm",
        "--add-qkv-bias",
        "--attention-output-gate",
        "--attention-softmax-in-fp32",
    ),
    "sparse attention: the indexer, and which layers reuse its choice": (
        "--experimental-attention-variant",
        "--dsa-indexer-n-heads",
        "--dsa-indexer-head-dim",
        "--dsa-indexer-topk",
        "--dsa-indexer-topk-freq",
        "--dsa-indexer-skip-topk-offset",
        "--dsa-indexer-rope-interleaved",
        "--dsa-indexer-k-norm-epsilon",
        "--allgather-cp",
    ),
    "gated delta net": (
        "--linear-attention-freq",
        "--linear-conv-kernel-dim",
        "--linear-key-head-dim",
        "--linear-value-head-dim",
        "--linear-num-key-heads",
        "--linear-num-value-heads",
    ),
    "positions": (
        "--position-embedding-type",
        "--use-rotary-position-embeddings",
        "--no-position-embedding",
        "--rotary-base",
        "--rotary-percent",
        "--rotary-interleaved",
        "--use-rope-scaling",
        "--rope-scaling-factor",
        "--rotary-scaling-factor",
        "--mscale",
        "--mscale-all-dim",
        "--yarn-beta-fast",
        "--yarn-beta-slow",
        "--yarn-original-max-position-embeddings",
        "--no-rope-fusion",
    ),
    "experts": (
        "--num-experts",
        "--moe-layer-freq",
        "--moe-ffn-hidden-size",
        "--moe-shared-expert-intermediate-size",
        "--moe-shared-expert-gate",
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-token-dispatcher-type",
        "--moe-token-drop-policy",
    ),
    "router": (
        "--moe-router-topk",
        "--moe-router-num-groups",
        "--moe-router-group-topk",
        "--moe-router-topk-scaling-factor",
        "--moe-router-score-function",
        "--moe-router-pre-softmax",
        "--moe-router-dtype",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate",
        "--moe-router-load-balancing-type",
        "--moe-aux-loss-coeff",
    ),
}
ORDER = {flag: place for place, flag in enumerate(flag for flags in SECTIONS.values() for flag in flags)}

# Flags that a script may leave to an environment variable, read when it is sourced.
KNOBS = {"--num-layers": "MODEL_ARGS_NUM_LAYERS", "--rotary-base": "MODEL_ARGS_ROTARY_BASE"}


def to_tokens(args: Mapping[str, Value]) -> list[str]:
    """The command line: `{"--swiglu": True, "--num-layers": 4}` -> `["--swiglu", "--num-layers", "4"]`."""
    return [token for flag, value in args.items() for token in _words(flag, value)]


def to_script(
    name: str, args: Mapping[str, Value], knobs: Sequence[str] = (), about: str = "", options: str = ""
) -> str:
    """The text of scripts/models/<name>.sh, which defines MODEL_ARGS and nothing else when it is sourced.

    knobs: flags (`--rotary-base`) whose value an environment variable of KNOBS overrides. about: the checkpoint, for
    the heading. options: what else tools/model_args.py was told.
    """
    options += "".join(f" --knob {flag.removeprefix('--')}" for flag in knobs)
    lines = [
        "# shellcheck shell=bash disable=SC2034",
        f"# {name}{about and f': {about}'}. Written by: python tools/model_args.py CONFIG --script {name}{options}",
        *(f"# {KNOBS[flag]}, when set, replaces the value of {flag}." for flag in knobs),
        "MODEL_ARGS=(",
    ]
    for heading, flags in SECTIONS.items():
        present = [flag for flag in flags if flag in args]
        if present:
            lines.append(f"   # {heading}")
            lines += [f"   {_shown(flag, args, knobs)}" for flag in present]
    return "\n".join([*lines, ")", ""])


def _words(flag: str, value: Value) -> list[str]:
    if value is True:
        return [flag]
    if isinstance(value, tuple):
        return [flag, *value]
    return [flag, _text(value)]


def _text(value: Value) -> str:
    """As people write it: 1e-6, not 1e-06."""
    return re.sub(r"e([+-])0+(\d)", r"e\1\2", str(value))


def _shown(flag: str, args: Mapping[str, Value], knobs: Sequence[str]) -> str:
    """One line of the array."""
    words = _words(flag, args[flag])
    if flag in knobs:
        words[1] = _default(flag, words[1])
    elif flag == "--moe-layer-freq" and "--num-layers" in knobs:
        words[1] = _stretched(words[1], args["--num-layers"])
    return " ".join(word if re.fullmatch(r"[\w.+-]+", word) else f'"{word}"' for word in words)


def _default(flag: str, value: str) -> str:
    return f"${{{KNOBS[flag]}:-{value}}}"


def _stretched(pattern: str, layers: Value) -> str:
    """The pattern for another number of layers: the last run takes what is left, as in 61 = 3 dense + 58."""
    head, count = pattern.rsplit("*", 1)
    rest = int(layers) - int(count)
    return f"{head}*$(({_default('--num-layers', str(layers))} - {rest}))"
