"""Steps around the name conversion of a parameter: vocabulary padding off, then the checkpoint's quantisation.

Pure torch, without Megatron: the weight push and the checkpoint tools share them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.formats import Scheme, parse_scheme
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4
from slime.backends.megatron_utils.megatron_to_hf.processors.selection import (
    is_routed_expert,
    may_be_quantized,
    module_of,
)

NamedTensor = tuple[str, torch.Tensor]


def quantize(named_tensors: Iterable[NamedTensor], quantization_config: Mapping[str, Any]) -> Iterator[NamedTensor]:
    """Tensors with Hugging Face names as a checkpoint with this `quantization_config` holds them, in order.

    Every matrix is quantised but embeddings, head, routers and what the config's ignore list names: an engine that
    read the same config has no other place for it. ValueError for a config that is not understood (at once), and for
    a weight that cannot be quantised, with its name.
    """
    return _quantize(named_tensors, parse_scheme(quantization_config))


def _quantize(named_tensors: Iterable[NamedTensor], scheme: Scheme) -> Iterator[NamedTensor]:
    for name, tensor in named_tensors:
        if may_be_quantized(name, tensor.shape) and not scheme.ignores(module_of(name)):
            yield from quantize_weight(name, tensor, scheme)
        else:
            yield name, tensor


def quantize_weight(name: str, weight: torch.Tensor, scheme: Scheme) -> Iterator[NamedTensor]:
    """The parts of one linear layer's weight [M, N]: `<module>.<part>`. ValueError names the weight."""
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name} is {weight.dtype}; only bfloat16, float16 and float32 weights can be quantised")
    module = module_of(name)
    if isinstance(scheme.format, PackedInt4) and not scheme.format.symmetric and is_routed_expert(module):
        raise ValueError(
            f"{name}: engines read the zero points of experts in an order of their own; routed experts need "
            '"symmetric": true'
        )
    try:
        parts = scheme.format.quantize(weight)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    for part, tensor in parts.items():
        yield f"{module}.{part}", tensor
