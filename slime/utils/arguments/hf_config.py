"""What a checkpoint directory holds, read without transformers: its kind, and the model facts of its config.json."""

import json
import re
from pathlib import Path
from typing import Any


def is_megatron_checkpoint(path: str | None) -> bool:
    """A directory with Megatron's tracker file, or one iteration of such a directory."""
    if path is None or not Path(path).is_dir():
        return False
    return (Path(path) / "latest_checkpointed_iteration.txt").is_file() or bool(
        re.fullmatch(r"iter_\d{7}", Path(path).name)
    )


def is_hf_checkpoint(path: str | None) -> bool:
    """A directory with a Hugging Face config.json."""
    return path is not None and (Path(path) / "config.json").is_file()


def read_hf_config(path: str | None) -> dict[str, Any] | None:
    """The language model's part of config.json; None when there is none. Broken JSON: ValueError naming the file."""
    if not is_hf_checkpoint(path):
        return None
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
    text = config.get("text_config")
    return {**text, "architectures": config.get("architectures")} if isinstance(text, dict) else config


def rope_theta(config: dict[str, Any]) -> float | None:
    """The base of the rotary embedding; newer configs keep it in `rope_parameters`."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
        return parameters["rope_theta"]
    return config.get("rope_theta")


def is_moe(config: dict[str, Any]) -> bool:
    """Whether the config describes experts."""
    keys = ("moe_intermediate_size", "num_experts", "n_routed_experts", "num_local_experts")
    return any(config.get(key) is not None for key in keys)
