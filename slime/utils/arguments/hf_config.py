"""What a checkpoint directory holds, told without transformers, and the parts of a config.json."""

import re
from argparse import Namespace
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


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: all of it, or the `text_config` of a multimodal model.

    What only the whole states, its architecture and the quantization of its weights, is kept.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    whole = {key: config[key] for key in ("architectures", "quantization_config") if key in config}
    return {**whole, **text, "architectures": config.get("architectures")}


def uses_sparse_attention(a: Namespace) -> bool:
    """Whether the model selects the keys of each query by an indexer (DeepSeek sparse attention)."""
    if a.experimental_attention_variant == "dsa" or a.dsa_indexer_topk is not None:
        return True
    return bool((a.hf_config or {}).get("index_topk"))
