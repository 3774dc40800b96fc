"""The flags of Megatron, SGLang and the router as tables, kept in a cache file per installed version.

Importing the three parsers takes half a minute; reading the tables takes milliseconds. The real parsers keep the last
word: trainers and engines parse their own flags again.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.utils.arguments.flag import Flag, FlagGroup, json_value, scaled_int

DISTRIBUTIONS = {"megatron": "megatron-core", "sglang": "sglang", "router": "sglang-router"}
TITLES = {"megatron": "Megatron-core", "sglang": "SGLang server", "router": "SGLang router"}
TABLE_FORMAT = 1  # raise it when the rows change, so that older cache files are rebuilt
BUILD_TIMEOUT_S = 300

# SGLang fields that slime sets for every engine, and what decides them instead of `--sglang-...`.
OWNED_SGLANG_FIELDS = {
    "model_path": "use --hf-checkpoint",
    "config": "pass the --sglang-... flags themselves",
    "trust_remote_code": "it is always on",
    "random_seed": "use --seed",
    "enable_memory_saver": "use --offload-rollout",
    "tp_size": "use --rollout-num-gpus-per-engine and --sglang-pp-size",
    "port": "free ports are found at start",
    "nnodes": "use --rollout-num-gpus-per-engine and --num-gpus-per-node",
    "node_rank": "it follows from the placement",
    "dist_init_addr": "free ports are found at start",
    "gpu_id_step": "it follows from the placement",
    "base_gpu_id": "it follows from the placement",
    "nccl_port": "free ports are found at start",
    "skip_server_warmup": "it is always on",
    "enable_return_routed_experts": "use --use-rollout-routing-replay",
}
# Values that SGLang still takes under an older name.
DEPRECATED_SGLANG_VALUES = {
    "attention_backend": (("nsa", "dsa"), ("compressed", "dsv4")),
    "prefill_attention_backend": (("nsa", "dsa"), ("compressed", "dsv4")),
    "decode_attention_backend": (("nsa", "dsa"), ("compressed", "dsv4")),
    "tool_call_parser": (("qwen25", "qwen"), ("glm45", "glm")),
}
# Defaults that differ from the router's own; they are passed to every router.
ROUTER_DEFAULTS = {"log_level": "warn", "balance_abs_threshold": 10, "balance_rel_threshold": 1.2}
# Router flags whose RouterArgs field is called otherwise.
ROUTER_FIELDS = {
    "tls_cert_path": "server_cert_path",
    "tls_key_path": "server_key_path",
    "prefill": "prefill_urls",
    "decode": "decode_urls",
}

_TYPES = {"int": int, "float": float, "str": str, "json": json_value, "scaled_int": scaled_int, "opaque": str}


@dataclass(frozen=True)
class UpstreamTables:
    """The three tables; the SGLang rows already carry `--sglang-` names and the options slime owns are left out."""

    megatron: FlagGroup
    sglang: FlagGroup
    router: FlagGroup
    owned_options: dict[str, str]  # "--sglang-model-path" -> what decides it


def cache_dir() -> Path:
    """Where the tables are kept: $XDG_CACHE_HOME/slime, or ~/.cache/slime."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slime"


def load_tables(directory: Path | None = None) -> UpstreamTables:
    """Read the tables of the installed versions, building those that are missing.

    directory: the cache, `cache_dir()` by default. Raises RuntimeError when a package is missing or its parser fails.
    """
    directory = directory or cache_dir()
    rows = {package: load_rows(package, directory) for package in DISTRIBUTIONS}
    sglang, owned = _sglang_flags(rows["sglang"])
    return UpstreamTables(
        megatron=FlagGroup("megatron", _title("megatron"), [_flag(row) for row in rows["megatron"]]),
        sglang=FlagGroup("sglang", _title("sglang") + ", each with the prefix --sglang-", sglang),
        router=FlagGroup("router", _title("router"), _router_flags(rows["router"])),
        owned_options=owned,
    )


def load_rows(package: str, directory: Path) -> list[dict[str, Any]]:
    """Rows of one package's parser, as `dump_upstream` writes them; built once for each version."""
    path = directory / f"flags-{DISTRIBUTIONS[package]}-{_version(package)}.json"
    try:
        cached = json.loads(path.read_text(encoding="utf-8"))
        if cached["format"] == TABLE_FORMAT:
            return cached["rows"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        pass  # no readable table of this version yet, or not one of ours: build it
    rows = _build(package)
    _write_atomically(path, json.dumps({"format": TABLE_FORMAT, "rows": rows}))
    return rows


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTIONS[package])
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(f"{DISTRIBUTIONS[package]} is not installed; run `pip install -e .`") from error


def _title(package: str) -> str:
    return f"{TITLES[package]} ({DISTRIBUTIONS[package]} {_version(package)})"


def _build(package: str) -> list[dict[str, Any]]:
    """Run the real parser in a process of its own, on the CPU, and read the rows it writes."""
    print(
        f"slime: reading the flags of {_title(package)}, once for this version (about 20 s)",
        file=sys.stderr,
        flush=True,
    )
    root = str(Path(__file__).resolve().parents[3])
    python_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": python_path, "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="slime-flags-") as scratch:
        output = Path(scratch) / "rows.json"
        command = [sys.executable, "-W", "ignore", "-m", "slime.utils.arguments.dump_upstream", package, str(output)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        if done.returncode or not output.exists():
            ended = f"`{' '.join(command)}` ended with code {done.returncode}"
            raise RuntimeError(f"cannot read the flags of {_title(package)}: {ended}\n{done.stderr[-3000:]}")
        return json.loads(output.read_text(encoding="utf-8"))


def _write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one. A read-only cache directory costs only the next start's time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as aside:
            aside.write(text)
        os.replace(aside.name, path)
    except OSError as error:
        print(f"slime: cannot keep {path} ({error}); the next start reads the flags again", file=sys.stderr)


def _flag(row: dict[str, Any], **changes: Any) -> Flag:
    name, *aliases = row["options"]
    values = {
        "name": name,
        "aliases": tuple(aliases),
        "type": _TYPES[row["type"]],
        "default": row["default"],
        "help": row["help"],
        "kind": row["kind"],
        "dest": row["dest"],
        "nargs": row["nargs"] if row["kind"] in ("value", "append") else None,
        "choices": tuple(row["choices"]) if row["choices"] else None,
        "const": row["const"],
        "opaque": row["type"] == "opaque",
        "deprecated": row["deprecated"],
    }
    return Flag(**{**values, **changes})


def _sglang_flags(rows: list[dict[str, Any]]) -> tuple[list[Flag], dict[str, str]]:
    flags, owned = [], {}
    for row in rows:
        options = ["--sglang-" + option.lstrip("-").removeprefix("sglang-") for option in row["options"]]
        if row["dest"] in OWNED_SGLANG_FIELDS:
            owned.update(dict.fromkeys(options, OWNED_SGLANG_FIELDS[row["dest"]]))
            continue
        dest = "sglang_" + row["dest"].removeprefix("sglang_")
        notice = (row["deprecated"] or _deprecated_in_help(row["help"])).replace("--", "--sglang-")
        values = DEPRECATED_SGLANG_VALUES.get(row["dest"], ())
        flags.append(_flag({**row, "options": options}, dest=dest, deprecated=notice, deprecated_values=values))
    return flags, owned


def _deprecated_in_help(text: str) -> str:
    """What a help text that begins with "Deprecated" tells to use instead; "" for any other text."""
    match = re.match(r"[\[(]?deprecated[\]:,.]*\s+([^)]+?)(?:\)|\. |\.?$)", text, re.IGNORECASE)
    return match[1][0].lower() + match[1][1:] if match else ""


def _router_flags(rows: list[dict[str, Any]]) -> list[Flag]:
    """`--worker-urls` is left out: the rollout manager registers the engines it starts."""
    flags = []
    for row in rows:
        if not row["dest"].startswith("router_"):
            continue
        field = row["dest"].removeprefix("router_")
        flags.append(_flag(row, default=ROUTER_DEFAULTS.get(field, row["default"])))
    return flags
