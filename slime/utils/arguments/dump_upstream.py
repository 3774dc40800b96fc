"""Writes the flags of Megatron, SGLang or the router as JSON rows: `python -m ...dump_upstream PACKAGE FILE`.

Importing these parsers takes 10 to 20 seconds, so the command line reads the file (see `upstream.py`) and runs this
only when a package's version is new. Nothing else in this package imports Megatron or SGLang.
"""

import argparse
import enum
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PLAIN_TYPES = {"int", "float", "str"}
_TYPE_NAMES = {"loads": "json", "json_list_type": "json", "human_readable_int": "scaled_int"}


def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's own flags. Optional GPU-only packages are hidden: importing them would read CUDA properties."""
    for package in ("flashinfer", "flash_attn"):
        sys.modules.setdefault(package, None)
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser


def sglang_parser() -> argparse.ArgumentParser:
    """The flags of `sglang.launch_server`."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def router_parser() -> argparse.ArgumentParser:
    """The flags of sglang-router, each as `--router-...`; host and port are slime's."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    return parser


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "megatron": megatron_parser,
    "sglang": sglang_parser,
    "router": router_parser,
}


def rows_of(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """One JSON-able row for each action, `--help` left out. Raises TypeError for an action kind it cannot express."""
    formatter = argparse.HelpFormatter("slime")
    return [_row(action, formatter) for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def _row(action: argparse.Action, formatter: argparse.HelpFormatter) -> dict[str, Any]:
    row = {
        "options": _options(action),
        "dest": action.dest,
        "kind": _kind(action),
        "type": _type(action),
        "nargs": action.nargs,
        "default": _json_able(action.default),
        "choices": None if action.choices is None else [_json_able(choice) for choice in action.choices],
        "const": getattr(action, "const_value", action.const),
        "help": _help(action, formatter),
        "deprecated": _deprecation(action),
    }
    if row["type"] == "opaque" and isinstance(action.choices, (list, tuple)) and _is_signal(action.choices):
        row["choices"] = None
    return row


def _options(action: argparse.Action) -> list[str]:
    if not isinstance(action, argparse.BooleanOptionalAction):
        return list(action.option_strings)
    return [option for option in action.option_strings if not option.startswith("--no-")]


def _kind(action: argparse.Action) -> str:
    name = type(action).__name__
    match name:
        case "_StoreTrueAction" | "DeprecatedStoreTrueAction":
            return "switch"
        case "_StoreFalseAction":
            return "off"
        case "_StoreConstAction" | "DeprecatedStoreConstAction":
            return "const"
        case "BooleanOptionalAction":
            return "tristate"
        case "_AppendAction":
            return "append"
        case "DeprecatedAction":
            return "ignored"
        case "_StoreAction" | "DeprecatedAliasStoreAction" | "LoRAPathAction":
            return "value"
    raise TypeError(f"{action.option_strings}: no table row for the argparse action {name}")


def _type(action: argparse.Action) -> str:
    """int, float, str, json, scaled_int, or opaque: text that only the upstream parser can read."""
    if type(action).__name__ == "LoRAPathAction":
        return "opaque"
    if action.type is None or action.nargs == 0:
        return "str"
    name = getattr(action.type, "__name__", "")
    return name if name in _PLAIN_TYPES else _TYPE_NAMES.get(name, "opaque")


def _help(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    if not action.help or action.help == argparse.SUPPRESS:
        return ""
    try:
        return formatter._expand_help(action)
    except (ValueError, KeyError, TypeError):  # a stray % in upstream's text: show it as it is
        return action.help


def _deprecation(action: argparse.Action) -> str:
    if not type(action).__name__.startswith("Deprecated"):
        return ""
    new_flag = getattr(action, "new_flag", None)
    return f"use {new_flag}" if new_flag else "it has no effect any more"


def _json_able(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_json_able(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool, dict)):
        return value
    return str(value)


def _is_signal(choices: list | tuple) -> bool:
    return any(type(choice).__name__ == "Signals" for choice in choices)


def main(argv: list[str]) -> None:
    """argv: package name and output file."""
    package, output = argv
    rows = rows_of(PARSERS[package]())
    Path(output).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
