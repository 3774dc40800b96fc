"""MLA attention on the torch_native backend.

SGLang 0.5.17 sends MLA prefill on unknown backends to the multi-head path, but torch_native reads K and V from the
cache, which holds MLA latents: wrong numbers, silently, wherever the shapes happen to fit. The absorbed path reads
latents and is right for prefill and decode alike.
"""

import types


def fix_dispatch(module: types.ModuleType) -> None:
    module.AttentionBackendRegistry.register("torch_native", lambda attn, batch: module.AttnForwardMethod.MLA)
