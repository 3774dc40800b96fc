"""Stands in for the CUDA wheel `sgl_kernel` so that SGLang 0.5.17 from PyPI serves models on a machine without a GPU.

Only a server's processes on the CPU have this directory's parent on PYTHONPATH; anywhere else it would shadow the real
wheel. Every process of a server imports `sgl_kernel` early, which makes this the one place to adapt them all. Two
things happen on import:

- any name of `sgl_kernel` can be imported; calling one raises, because SGLang's CPU code computes with plain torch;
- the modules named in FIXES are adapted right after they are executed, each by one small file with its reason.

FIXES replaces private names of sglang 0.5.17; `server_args.check_version` refuses other versions on the CPU.
"""

from sgl_kernel import _attention, _cuda_calls, _deterministic, _dsa, _fork, _mla, _rope
from sgl_kernel._after_import import run_after_import
from sgl_kernel._missing import add_missing_submodules, missing_names

__version__ = "0.0.0+cpu"

FIXES = {
    "sglang.srt.batch_invariant_ops": _deterministic.fix_batch_invariant_mode,
    "sglang.srt.configs.model_config": _dsa.fix_config_probe,
    "sglang.srt.entrypoints.engine": _fork.fix_engine,
    "sglang.srt.layers.attention.dsa.dsa_indexer": _dsa.fix_indexer,
    "sglang.srt.layers.attention.torch_native_backend": _attention.fix_backend,
    "sglang.srt.layers.rotary_embedding.factory": _rope.fix_factory,
    "sglang.srt.layers.sampler": _deterministic.fix_sampler,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _mla.fix_dispatch,
    "sglang.srt.models.deepseek_v2": _dsa.fix_model,
    "sglang.srt.server_args": _deterministic.fix_server_args,
    "sglang.srt.state_capturer.base": _cuda_calls.fix_torch,
    "sglang.srt.utils.weight_checker": _cuda_calls.fix_torch,
}

run_after_import(FIXES)
add_missing_submodules(__name__)
__getattr__ = missing_names(__name__)
