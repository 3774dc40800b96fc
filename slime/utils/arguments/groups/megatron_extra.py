"""Flags: what slime adds to Megatron, and the YAML file that may set any argument."""

from slime.utils.arguments.flag import Flag, FlagGroup, switch


def _deepgemm(name: str, type_: type, what: str) -> Flag:
    return Flag(name, type_, None, f"{what} that run the engines' FP8 kernels.", nargs="+", supported=False)


GROUP = FlagGroup(
    "megatron_extra",
    "Megatron additions and plug-in settings",
    [
        Flag(
            "--custom-config-path",
            str,
            None,
            "YAML file whose top-level keys set arguments; how plug-ins get their settings.",
        ),
        Flag("--data-pad-size-multiplier", int, 128, "Packed batches are padded to a multiple of this many tokens."),
        Flag("--padded-vocab-size", int, None, "Vocabulary size of the model. Default: padded from the checkpoint's."),
        Flag(
            "--mtp-num-layers",
            int,
            None,
            "Multi-token-prediction layers to load, keep and push; frozen without --enable-mtp-training.",
        ),
        Flag(
            "--mtp-loss-scaling-factor",
            float,
            0.2,
            "Weight of the loss of multi-token-prediction layers, which reaches these layers alone.",
        ),
        switch("--enable-mtp-training", "Train the multi-token-prediction layers beside the policy."),
        switch("--post-self-attn-layernorm", "A norm after the attention, before its residual (GLM-4)."),
        switch("--post-mlp-layernorm", "A norm after the MLP, before its residual (GLM-4)."),
        switch(
            "--use-gated-attention",
            "Attention with an output gate.",
            deprecated="it changes nothing: models with a gated attention get it from their config",
        ),
        Flag("--custom-megatron-init-path", str, None, "Hook f(args) at the end of Megatron's initialisation."),
        Flag(
            "--custom-megatron-before-log-prob-hook-path",
            str,
            None,
            "Hook f(args, model, store_prefix) before a log-prob pass.",
        ),
        Flag("--custom-megatron-before-train-step-hook-path", str, None, "Hook before each optimizer step."),
        _deepgemm("--megatron-deepgemm-forward-layers", int, "Layers"),
        _deepgemm("--megatron-deepgemm-forward-modules", str, "Modules"),
        _deepgemm("--megatron-deepgemm-moe-forward-layers", int, "MoE layers"),
        _deepgemm("--megatron-deepgemm-moe-forward-modules", str, "MoE modules"),
    ],
)
