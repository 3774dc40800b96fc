"""The weights of a Hugging Face directory by the names of an unquantised checkpoint, whatever format they lie in."""

from pathlib import Path

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.formats import parse_scheme
from slime.utils.safetensors_io import CheckpointDirectory


class Weights:
    """Reads tensor by tensor on the CPU. Weights in FP8 or packed INT4 become bfloat16.

    CheckpointError for a directory that is not complete, ValueError for a quantisation that is not understood.
    """

    def __init__(self, path: str | Path):
        self.directory = CheckpointDirectory(path)
        config = self.directory.config
        quantization = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
        self._format = parse_scheme(quantization).format if quantization else None

    @property
    def path(self) -> Path:
        """The directory."""
        return self.directory.path

    @property
    def names(self) -> set[str]:
        """Every tensor of the files, scales of quantised weights included."""
        return set(self.directory.weight_map)

    def __contains__(self, name: str) -> bool:
        return all(part in self.directory for part in self.parts(name))

    def parts(self, name: str) -> list[str]:
        """The tensors of the files that make up `name`: itself, or a quantised weight with its scales."""
        module, _, leaf = name.rpartition(".")
        if self._format is None or leaf != "weight":
            return [name]
        main = f"{module}.{self._format.parts[0]}"
        if main not in self.directory or (main == name and self.directory.info(name).dtype.itemsize > 1):
            return [name]
        return [f"{module}.{part}" for part in self._format.parts]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in the dtype of the file or bfloat16. CheckpointError when it or one of its parts is missing."""
        parts = self.parts(name)
        tensors = [self.directory.read(part) for part in parts]
        if len(parts) > 1:
            return self._format.dequantize(
                {part.rpartition(".")[2]: t for part, t in zip(parts, tensors, strict=True)}
            )
        if tensors[0].element_size() == 1:
            raise ValueError(
                f"{name} of {self.path} is quantised ({tensors[0].dtype}), but config.json has no quantization_config"
            )
        return tensors[0]
