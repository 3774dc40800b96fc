"""Megatron pads the vocabulary to a multiple that all TP ranks can share; Hugging Face checkpoints do not."""

import torch

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def remove_padding(name: str, param: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """param[:vocab_size] for the two vocabulary matrices (name without "module."), any other unchanged."""
    return param[:vocab_size] if name in VOCABULARY else param
