"""Lets an unmodified megatron-core 0.19 run on CPU tensors over gloo: torch.cuda is answered by the CPU.

Process-wide, so for trainer processes only. Not needed once Megatron asks an accelerator object for its device.

Megatron hard-codes the GPU in these ways, and each gets one answer:

1. ``torch.cuda.current_device()`` as a ``device=``      -> ``torch.device("cpu")``
2. the literal ``"cuda"`` in tensor factories and ``.to`` -> the CPU
3. streams, events, synchronize, nvtx, memory counters    -> do nothing
4. torch.cuda random state                                -> the CPU's default generator
5. ``param.type() == "torch.cuda.FloatTensor"`` checks    -> the name Megatron expects, to Megatron only
6. ``all_to_all_single`` with splits left as tensors, ``barrier(device_ids=...)``, ``torch.compile`` of fused functions
7. optional GPU packages that it imports when present     -> made unimportable

``torch.cuda.is_available()`` stays False.
"""

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

CPU = torch.device("cpu")

# Importing these reads CUDA properties or loads kernels that cannot run; Megatron falls back when they are missing.
GPU_ONLY_PACKAGES = (
    "transformer_engine",
    "apex",
    "flashinfer",
    "flash_attn",
    "flash_attn_3",
    "fast_hadamard_transform",
)

_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "empty_like")
_LIKE_FACTORIES = ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_DO_NOTHING = ("set_device", "synchronize", "empty_cache", "set_stream", "ipc_collect", "reset_peak_memory_stats")
_COUNTERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")

_installed = False


def install() -> bool:
    """Patch torch for Megatron on the CPU; True when the shim is in place afterwards.

    Idempotent. Does nothing (False) where CUDA is available. RuntimeError when megatron was imported before: its
    modules bind torch functions at import and would keep the unpatched ones.
    """
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    loaded = sorted(name for name in sys.modules if name.startswith("megatron.core"))
    if loaded:
        raise RuntimeError(f"the CPU shim must be installed before megatron is imported; already loaded: {loaded[0]}")
    for package in GPU_ONLY_PACKAGES:
        sys.modules[package] = None  # type: ignore[assignment]  # import raises ModuleNotFoundError
    _patch_torch_cuda()
    _patch_random_state()
    _patch_tensor()
    _patch_distributed()
    torch.compile = _no_compile
    _installed = True
    return True


class _Stream:
    """Stands in for torch.cuda.Stream and torch.cuda.Event: all work is already synchronous."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Stream") -> float:
        return 0.0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __getattr__(self, name: str) -> Callable:  # wait_stream, wait_event, synchronize, record, wait ...
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Event(_Stream):
    pass


def _constant(value: Any) -> Callable:
    """A new function at each call: torch._dynamo refuses one function object under two torch names."""
    return lambda *args, **kwargs: value


def _patch_torch_cuda() -> None:
    cuda = torch.cuda
    cuda.current_device = _constant(CPU)
    for name in _DO_NOTHING:
        setattr(cuda, name, _constant(None))
    for name in _COUNTERS:
        setattr(cuda, name, _constant(0))
    cuda.memory_stats = _constant({})
    cuda.mem_get_info = _constant((0, 0))
    # Argument validation asks for capability >= 8 (grouped GEMM); major 10 needs no CUDA_DEVICE_MAX_CONNECTIONS.
    cuda.get_device_capability = _constant((10, 0))
    cuda.get_device_properties = _constant(types.SimpleNamespace(major=10, minor=0, name="cpu", total_memory=0))
    cuda.is_current_stream_capturing = _constant(False)
    cuda.Stream, cuda.Event = _Stream, _Event
    stream = _Stream()
    cuda.current_stream, cuda.default_stream = _constant(stream), _constant(stream)
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _constant(0), _constant(0)


def _patch_random_state() -> None:
    """One generator, the CPU's. Megatron's tracker defers its calls with _lazy_call, which must run them at once."""
    cuda = torch.cuda
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.default_generators = _CpuGenerators()
    cuda._lazy_call = lambda function, **kwargs: function()
    cuda._lazy_init = _constant(None)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_expected_warning_filter)


def _expected_warning_filter(record: logging.LogRecord) -> bool:
    """Megatron warns when the CPU generator moves inside a GPU random fork. Here they are the same generator."""
    return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")


class _CpuGenerators:
    """torch.cuda.default_generators: the CPU's generator under every index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _on_cpu(function: Callable) -> Callable:
    """Wrap a tensor factory (or Tensor.to) so that a "cuda" device means the CPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)  # pinning needs a GPU driver
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        elif len(args) > 1 and _is_cuda(args[1]):  # tensor.to("cuda")
            args = (args[0], CPU, *args[2:])
        return function(*args, **kwargs)

    return wrapper


def _patch_tensor() -> None:
    # `with torch.device("meta")` recognises factories by identity. Its cached table must hold the real ones, or
    # transformers builds models whose rotary buffers are uninitialised memory, without an error.
    torch.utils._device._device_constructors()
    for name in _FACTORIES + _LIKE_FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = _type_as_megatron_expects(torch.Tensor.type)


def _type_as_megatron_expects(real_type: Callable) -> Callable:
    @functools.wraps(real_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = real_type(self, *args, **kwargs)
        if isinstance(out, str) and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            return out.replace("torch.", "torch.cuda.", 1)
        return out

    return type_


def _patch_distributed() -> None:
    real_all_to_all, real_barrier = dist.all_to_all_single, dist.barrier

    @functools.wraps(real_all_to_all)
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        # The MoE dispatcher turns splits into lists only when they live on a GPU.
        splits = (s.tolist() if torch.is_tensor(s) else s for s in (output_split_sizes, input_split_sizes))
        return real_all_to_all(output, input, *splits, **kwargs)

    @functools.wraps(real_barrier)
    def barrier(group=None, async_op=False, device_ids=None):
        return real_barrier(group, async_op)  # device_ids would hold a torch.device

    dist.all_to_all_single, dist.barrier = all_to_all_single, barrier


def _no_compile(function: Callable | None = None, **kwargs: Any) -> Callable:
    """torch.compile as the identity: Megatron fuses a handful of small functions, a C++ compile each on the CPU."""
    return function if function is not None else lambda f: f
