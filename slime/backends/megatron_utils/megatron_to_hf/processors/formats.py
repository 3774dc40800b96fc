"""The `quantization_config` of a config.json as the format it stands for, and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8, ChannelFp8, TensorFp8
from slime.backends.megatron_utils.megatron_to_hf.processors.int4 import PackedInt4
from slime.backends.megatron_utils.megatron_to_hf.processors.selection import name_rule_matches, path_rule_matches

Format = BlockFp8 | ChannelFp8 | TensorFp8 | PackedInt4


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's weights are quantised, and the rules that name the modules which are not."""

    format: Format
    ignore: tuple[str, ...]
    matches: Callable[[str, str], bool]

    def ignores(self, module: str) -> bool:
        """Whether a rule names the module (a path without ".weight")."""
        return any(self.matches(rule, module) for rule in self.ignore)


def parse_scheme(config: Mapping[str, Any]) -> Scheme:
    """ValueError names the key, its value and what is known, for every config that is not exactly understood."""
    method = config.get("quant_method")
    if method not in _PARSERS:
        raise ValueError(f"quantization_config: quant_method {method!r} is not known; known: {', '.join(_PARSERS)}")
    return _PARSERS[method](config)


def _parse_fp8(config: Mapping[str, Any]) -> Scheme:
    _expect(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    _expect(config, "activation_scheme", ("dynamic",), "dynamic")
    _expect(config, "scale_fmt", ("float", "ue8m0", None), None)
    block = config.get("weight_block_size")
    if block is None:
        format = TensorFp8()
    elif len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
        format = BlockFp8((block[0], block[1]), config.get("scale_fmt") == "ue8m0")
    else:
        raise ValueError(f"quantization_config: weight_block_size {block} must be two positive integers: [128, 128]")
    rules = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    return Scheme(format, tuple(rules), path_rule_matches)


def _parse_compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise ValueError(f"quantization_config: one config_group is understood, here are {len(groups)}")
    group = next(iter(groups.values()))
    if group.get("targets") != ["Linear"]:
        raise ValueError(f'quantization_config: targets {group.get("targets")} must be ["Linear"]')
    weights = group["weights"]
    kind = (group.get("format") or config.get("format"), weights["type"], weights["num_bits"], weights["strategy"])
    if weights.get("actorder") not in (None, "static", "weight"):  # those two leave the columns where they are
        raise ValueError(f"quantization_config: actorder {weights['actorder']!r} is not understood; known: static")
    if kind == ("pack-quantized", "int", 4, "group"):
        format = PackedInt4(weights["group_size"], weights["symmetric"])
    elif kind == ("float-quantized", "float", 8, "channel"):
        format = ChannelFp8()
    else:
        raise ValueError(
            f"quantization_config: {' '.join(map(str, kind))} is not understood; known: "
            "pack-quantized int 4 group, float-quantized float 8 channel"
        )
    return Scheme(format, tuple(config.get("ignore") or ()), name_rule_matches)


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _parse_fp8,
    "compressed-tensors": _parse_compressed_tensors,
}


def describe_scheme(format: Format, ignore: Sequence[str]) -> dict[str, Any]:
    """The quantization_config that SGLang and transformers read."""
    if isinstance(format, BlockFp8 | TensorFp8):
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        if isinstance(format, BlockFp8):
            config["weight_block_size"] = list(format.block_size)
            if format.power_of_two:
                config["scale_fmt"] = "ue8m0"
        return config | {"modules_to_not_convert": list(ignore)}
    if isinstance(format, ChannelFp8):
        name = "float-quantized"
        weights = _quantization_args(num_bits=8, type="float", strategy="channel")
        activations = _quantization_args(num_bits=8, type="float", strategy="token", dynamic=True)
    else:
        name, activations = "pack-quantized", None
        group = {"group_size": format.group_size, "symmetric": format.symmetric}
        weights = _quantization_args(num_bits=4, type="int", strategy="group", **group)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def _quantization_args(**values: Any) -> dict[str, Any]:
    return {"symmetric": True, "dynamic": False, "observer": None} | values


def _expect(config: Mapping[str, Any], key: str, known: Sequence[Any], default: Any) -> None:
    value = config.get(key, default)
    if value not in known:
        raise ValueError(
            f"quantization_config: {key} {value!r} is not understood; known: {', '.join(map(str, known))}"
        )
