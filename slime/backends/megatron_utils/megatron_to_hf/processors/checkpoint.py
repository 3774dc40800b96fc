"""Quantising and dequantising whole checkpoints: which tensor becomes which, from the headers alone."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors import quantize_weight
from slime.backends.megatron_utils.megatron_to_hf.processors.formats import (
    Format,
    Scheme,
    describe_scheme,
    parse_scheme,
)
from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8, ChannelFp8
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4
from slime.backends.megatron_utils.megatron_to_hf.processors.selection import (
    check_fused,
    fused_names,
    is_known_linear,
    is_routed_expert,
    may_be_quantized,
    module_of,
    name_rule_matches,
    path_rule_matches,
)
from slime.utils.safetensors_io import CheckpointDirectory, CheckpointError, TensorInfo

NamedTensor = tuple[str, torch.Tensor]

# Families whose experts [E, out, in] of one layer lie in one tensor without ".weight", gate above up.
_FUSED_EXPERT_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
_FUSED_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)$")
_CONFIG_KEY = "quantization_config"


class QuantizeRule:
    """Linear layers become `format`, everything else stays as it is.

    ignore: rules of modules to leave alone (path_rule_matches). quantized, kept: the modules (paths) of either kind;
    unknown: those among the kept ones that could be linear layers but have a name we do not know.
    ValueError when nothing would be quantised, when layers that engines fuse would differ, or for experts in a layout
    that is not understood; CheckpointError when the checkpoint is quantised already.
    """

    def __init__(self, source: CheckpointDirectory, format: Format, ignore: Sequence[str] = (), device: str = "cpu"):
        if _CONFIG_KEY in source.config:
            method = source.config[_CONFIG_KEY].get("quant_method")
            raise CheckpointError(
                f"{source.path} is quantised already (quant_method {method!r}); cast it to bfloat16 first "
                "(tools/fp8_cast_bf16.py, tools/convert_k2_thinking_int4_to_bf16.py)"
            )
        self._source = source
        self._device = device
        self._format = format
        self._rules = tuple(ignore)
        self.quantized: list[str] = []
        self.kept: list[str] = []
        self.unknown: list[str] = []
        for name in source.weight_map:
            for piece in self._pieces(name):
                self._decide(piece, _piece_shape(source.info(name).shape, piece != name))
        check_fused(self.quantized, self.kept)
        if not self.quantized:
            raise ValueError(f"no weight of {source.path} would be quantised: the ignore rules name all of them")
        self._selected = frozenset(self.quantized)

    @property
    def scheme(self) -> Scheme:
        """The format with an ignore list that names every kept module, so that a reader needs no rules of its own."""
        compressed = isinstance(self._format, PackedInt4 | ChannelFp8)
        matches = name_rule_matches if compressed else path_rule_matches
        named = [rule for rule in self._rules if compressed and rule.startswith("re:")]
        names = {"lm_head"}
        for module in self.kept:
            if not any(matches(rule, module) for rule in named):
                names |= {module, *fused_names(module)}
        return Scheme(self._format, tuple(named + sorted(names, key=_natural)), matches)

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the result."""
        return self._source.config | {_CONFIG_KEY: describe_scheme(self._format, self.scheme.ignore)}

    def outputs(self, name: str) -> dict[str, TensorInfo]:
        """See Rule."""
        info = self._source.info(name)
        infos: dict[str, TensorInfo] = {}
        for piece in self._pieces(name):
            shape = _piece_shape(info.shape, piece != name, half=not piece.endswith("down_proj.weight"))
            if module_of(piece) not in self._selected:
                infos[piece] = TensorInfo(info.dtype, shape)
                continue
            try:
                parts = _quantized_infos(self._format, info.dtype, shape)
            except ValueError as error:
                raise ValueError(f"{piece}: {error}") from error
            infos |= {f"{module_of(piece)}.{part}": part_info for part, part_info in parts.items()}
        return infos

    def convert(self, name: str) -> Iterator[NamedTensor]:
        """See Rule."""
        tensor = self._source.read(name)
        pieces = self._pieces(name)
        if pieces == [name]:
            parts = [tensor]
        else:
            parts = [half for expert in tensor for half in expert.chunk(len(pieces) // len(tensor))]
        scheme = Scheme(self._format, (), path_rule_matches)
        for piece, part in zip(pieces, parts, strict=True):
            if module_of(piece) in self._selected:
                yield from quantize_weight(piece, part.to(self._device), scheme)
            else:
                yield piece, part

    def _decide(self, name: str, shape: Sequence[int]) -> None:
        module = module_of(name)
        if module is None or len(shape) < 2:
            return
        candidate = may_be_quantized(name, shape)
        ignored = any(path_rule_matches(rule, module) or name_rule_matches(rule, module) for rule in self._rules)
        if candidate and is_known_linear(module) and not ignored:
            self.quantized.append(module)
            return
        self.kept.append(module)
        if candidate and not is_known_linear(module) and not ignored:
            self.unknown.append(module)

    def _pieces(self, name: str) -> list[str]:
        """The tensor itself, or the names of the single experts' weights in it."""
        match = _FUSED_EXPERTS.match(name)
        if not match or len(self._source.info(name).shape) != 3:
            return [name]
        model_type = self._source.config.get("model_type")
        if model_type not in _FUSED_EXPERT_TYPES:
            raise ValueError(
                f"{name}: experts of model_type {model_type!r} in one tensor are not understood; "
                f"known: {', '.join(_FUSED_EXPERT_TYPES)}"
            )
        leaves = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        experts = self._source.info(name).shape[0]
        return [f"{match[1]}.{expert}.{leaf}.weight" for expert in range(experts) for leaf in leaves]


class DequantizeRule:
    """Quantised weights become bfloat16, their scales disappear, everything else stays as it is.

    Understands every format that QuantizeRule writes. ValueError when a weight lacks one of its parts, a part belongs
    to no weight, or the config does not describe a tensor; CheckpointError when the checkpoint is not quantised.
    """

    def __init__(self, source: CheckpointDirectory, device: str = "cpu"):
        if _CONFIG_KEY not in source.config:
            raise CheckpointError(f"{source.path} is not quantised: its config.json has no {_CONFIG_KEY}")
        self._source = source
        self._device = device
        self._format = parse_scheme(source.config[_CONFIG_KEY]).format
        self.modules = {name.rpartition(".")[0] for name in source.weight_map if self._holds_values(name)}
        for name in source.weight_map:
            self._check(name)

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the result."""
        config = {key: value for key, value in self._source.config.items() if key != _CONFIG_KEY}
        return config | {"dtype" if "dtype" in config else "torch_dtype": "bfloat16"}

    def outputs(self, name: str) -> dict[str, TensorInfo]:
        """See Rule. Of INT4 weights the tiny weight_shape is read."""
        module, part = name.rpartition(".")[::2]
        if module not in self.modules or part not in self._format.parts:
            return {name: self._source.info(name)}
        if part != self._format.parts[0]:
            return {}
        shape = self._source.info(name).shape
        if isinstance(self._format, PackedInt4):
            shape = tuple(int(size) for size in self._source.read(f"{module}.weight_shape"))
        return {f"{module}.weight": TensorInfo(torch.bfloat16, shape)}

    def convert(self, name: str) -> Iterator[NamedTensor]:
        """See Rule."""
        module, part = name.rpartition(".")[::2]
        if module not in self.modules or part not in self._format.parts:
            yield name, self._source.read(name)
        elif part == self._format.parts[0]:
            parts = {each: self._source.read(f"{module}.{each}").to(self._device) for each in self._format.parts}
            try:
                yield f"{module}.weight", self._format.dequantize(parts)
            except ValueError as error:
                raise ValueError(f"{module}: {error}") from error

    def _holds_values(self, name: str) -> bool:
        """Whether these are quantised values: packed words, or an FP8 `.weight`."""
        main = self._format.parts[0]
        if not name.endswith("." + main):
            return False
        return main != "weight" or self._source.info(name).dtype == torch.float8_e4m3fn

    def _check(self, name: str) -> None:
        module, part = name.rpartition(".")[::2]
        main, *others = self._format.parts
        if module in self.modules:
            missing = [each for each in others if f"{module}.{each}" not in self._source]
            if missing:
                raise ValueError(f"{name} is quantised, but there is no {module}.{missing[0]}")
        elif part in others:
            raise ValueError(f"{name} belongs to no quantised weight: {module}.{main} is missing or not quantised")
        elif self._source.info(name).dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(f"{name} is {self._source.info(name).dtype}, which the config does not describe")


def edge_blocks(rule: QuantizeRule, source: CheckpointDirectory, format: BlockFp8) -> list[str]:
    """Quantised weights whose sides are no multiples of the block: engines may refuse them, some readers misread."""
    bm, bn = format.block_size
    weights = (f"{module}.weight" for module in rule.quantized)
    shapes = {name: source.info(name).shape for name in weights if name in source}
    return [name for name, (rows, columns) in shapes.items() if rows % bm or columns % bn]


def has_routed_experts(source: CheckpointDirectory) -> bool:
    """Whether the model has experts chosen by a router."""
    return any(_FUSED_EXPERTS.match(name) or is_routed_expert(module_of(name) or "") for name in source.weight_map)


def _piece_shape(shape: tuple[int, ...], is_piece: bool, half: bool = False) -> tuple[int, ...]:
    if not is_piece:
        return shape
    return (shape[1] // 2 if half else shape[1], shape[2])


@cache
def _quantized_infos(format: Format, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, TensorInfo]:
    weight = torch.empty(shape, dtype=dtype, device="meta")
    parts = format.quantize(weight)
    return {part: TensorInfo.of(tensor) for part, tensor in parts.items()}


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts layer 9 before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
