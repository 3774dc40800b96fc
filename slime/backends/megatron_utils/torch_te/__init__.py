"""Transformer Engine's modules in plain torch, for runs without it (the CPU, or a GPU host that lacks it).

`install()` puts them where megatron-core 0.19 looks for TE's, so that mcore's own layer specs (decoder block, MoE,
MLA, DSA) build unchanged. Module tree and parameter names are those of a TE run: name maps and checkpoints are shared.
Not needed where transformer_engine is importable. Importing this package does not import megatron.
"""

import importlib
import sys


def install() -> bool:
    """Install the torch modules into the megatron.core modules; True when they are in use afterwards.

    Idempotent; does nothing (False) when transformer_engine is importable. On the CPU the accelerator's
    prepare_trainer() must have run before, since this imports megatron.core.
    """
    if _transformer_engine_is_importable():
        return False
    modules = _torch_modules()
    for user in _TE_USERS:
        importlib.import_module(f"megatron.core.{user}")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            for te_name in modules.keys() & vars(module).keys():
                setattr(module, te_name, modules[te_name])
    _enable_te_specs()
    _use_fused_adam()
    return True


# megatron.core modules that bind TE's class names (or do so for others) at import
_TE_USERS = (
    "extensions.transformer_engine",
    "extensions.transformer_engine_spec_provider",
    "models.backends",
    "models.gpt.gpt_layer_specs",
    "models.gpt.experimental_attention_variant_module_specs",
    "transformer.attention",
    "transformer.experimental_attention_variant.absorbed_mla",
    "transformer.multi_latent_attention",
    "transformer.multi_token_prediction",
    "transformer.transformer_block",
)


def _transformer_engine_is_importable() -> bool:
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return False
    return True


def _torch_modules() -> dict[str, type]:
    """TE's names in megatron.core -> the classes of this package."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from slime.backends.megatron_utils.torch_te import grouped_linear, linear, norm, packed_attention

    return {
        "TENorm": norm.Norm,
        "TELinear": linear.DuplicatedLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TELayerNormColumnParallelLinear": linear.LayerNormColumnParallelLinear,
        "TEColumnParallelGroupedLinear": grouped_linear.ColumnParallelGroupedLinear,
        "TERowParallelGroupedLinear": grouped_linear.RowParallelGroupedLinear,
        "TEDotProductAttention": packed_attention.PackedAttention,
    }


def _enable_te_specs() -> None:
    """Let mcore's TE spec provider be chosen, and choose the newest variant of everything."""
    provider = sys.modules["megatron.core.extensions.transformer_engine_spec_provider"]
    # Its two version questions select TENorm for the q/k norms and grouped experts; both exist here.
    provider.is_te_min_version = lambda *args, **kwargs: True
    provider.TESpecProvider.activation_func = lambda self: None
    for user in ("gpt_layer_specs", "experimental_attention_variant_module_specs"):
        sys.modules[f"megatron.core.models.gpt.{user}"].TESpecProvider = provider.TESpecProvider


def _use_fused_adam() -> None:
    """mcore's distributed optimizer cannot save or reshard torch Adam's per-tensor "step"; give it Apex's layout."""
    from slime.backends.megatron_utils.torch_te.fused_adam import FusedAdam

    optimizer = importlib.import_module("megatron.core.optimizer")
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER = FusedAdam, True, True
