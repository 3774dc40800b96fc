"""What a checkpoint directory holds, told without transformers, and the parts of a config.json."""

import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.utils import layout

TRACKER = "latest_checkpointed_iteration.txt"


def megatron_checkpoint(path: str | None) -> tuple[Path, int | None] | None:
    """(the directory with the tracker file, the iteration in it or None for its newest) of a path; None if neither.

    Besides that directory, its `iter_<n>` are taken, and `release` while the tracker names it: Megatron can be told an
    iteration, but not a release that is not the newest.
    """
    if path is None or not os.path.isdir(path):
        return None
    directory = Path(path)
    if (directory / TRACKER).is_file():
        return directory, None
    if re.fullmatch(r"iter_\d{7}", directory.name):
        return directory.parent, int(directory.name[5:])
    tracker = directory.parent / TRACKER
    if directory.name == "release" and tracker.is_file() and tracker.read_text().strip() == "release":
        return directory.parent, None
    return None


def is_megatron_checkpoint(path: str | None) -> bool:
    """A directory with Megatron's tracker file, or a checkpoint in it that can be loaded."""
    return megatron_checkpoint(path) is not None


def is_unlisted_megatron_checkpoint(path: str | None) -> bool:
    """Weights in Megatron's torch_dist format that no tracker file leads to, such as a superseded `release`."""
    if path is None or is_megatron_checkpoint(path) or is_hf_checkpoint(path):
        return False
    return all((Path(path) / name).is_file() for name in (".metadata", "metadata.json"))


def is_hf_checkpoint(path: str | None) -> bool:
    """A directory with a Hugging Face config.json."""
    return path is not None and os.path.isfile(Path(path) / "config.json")


# Sizes that the checks and the plan compute with.
SIZES = frozenset(
    {
        "first_k_dense_replace",
        "head_dim",
        "hidden_size",
        "index_head_dim",
        "index_n_heads",
        "index_skip_topk_offset",
        "index_topk",
        "index_topk_freq",
        "intermediate_size",
        "kv_lora_rank",
        "max_position_embeddings",
        "model_max_length",
        "max_seq_len",
        "max_sequence_length",
        "moe_intermediate_size",
        "mtp_num_hidden_layers",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "num_experts",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "num_nextn_predict_layers",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "seq_length",
        "v_head_dim",
        "vocab_size",
    }
)


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: all of it, or the `text_config` of a multimodal model.

    What only the whole states, its architecture and the quantization of its weights, is kept. A size that is no whole
    number (some families list one for each layer) is left out, as nothing here can compute with it; families that can
    be trained refuse it by name (`slime.utils.model_facts`).
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        whole = {key: config[key] for key in ("architectures", "quantization_config") if key in config}
        config = {**whole, **text, "architectures": config.get("architectures")}
    kinds = {**dict.fromkeys(SIZES, int), "quantization_config": dict}
    return {key: value for key, value in config.items() if key not in kinds or type(value) is kinds[key]}


def uses_sparse_attention(a: Namespace) -> bool:
    """Whether the model selects the keys of each query by an indexer, by its flags or by its config.json."""
    return layout.uses_sparse_attention(a) or bool((a.hf_config or {}).get("index_topk"))
