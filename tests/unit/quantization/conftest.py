"""Tiny bfloat16 checkpoints in several files, made once: a dense and a mixture-of-experts model."""

import os
from pathlib import Path

import pytest

# sides are multiples of the 128 x 128 block, as engines want them, and no two roles share a size
DENSE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = 6


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Path:
    """A directory with `dense` (qwen3) and `moe` (qwen3_moe), random weights, files of at most 1 MB."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("checkpoints")
    common = DENSE | {
        "vocab_size": 250,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    torch.manual_seed(0)
    dense = transformers.Qwen3Config(num_hidden_layers=3, **common)
    transformers.Qwen3ForCausalLM(dense).bfloat16().save_pretrained(directory / "dense", max_shard_size="1MB")
    moe = transformers.Qwen3MoeConfig(
        num_hidden_layers=2, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=128, **common
    )
    transformers.Qwen3MoeForCausalLM(moe).bfloat16().save_pretrained(directory / "moe", max_shard_size="1MB")
    for name in ("dense", "moe"):
        (directory / name / "tokenizer.bin").write_bytes(b"no weights in here")
        (directory / name / "figures").mkdir()
        (directory / name / "figures" / "chat.jinja").write_text("{{ messages }}")
        (directory / name / "pytorch_model.bin").write_bytes(b"weights in an older format")
        (directory / name / ".cache").mkdir()
    return directory
