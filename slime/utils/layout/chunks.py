"""What each (virtual) pipeline stage holds, as data. How it comes about is in pipeline.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """One virtual stage of one pipeline rank."""

    pp_rank: int
    vp_stage: int
    layers: tuple[int, ...]  # 0-based global decoder layers
    embedding: bool  # word embedding
    head: bool  # final norm, output layer and loss
    mtp_layers: tuple[int, ...]  # 0-based depths of multi-token-prediction layers


@dataclass(frozen=True)
class PipelineLayout:
    """All chunks in the order of the forward pass: vp_stage major, pp_rank minor. Layers ascend without a gap."""

    chunks: tuple[Chunk, ...]
    pp_size: int
    vp_size: int

    def __post_init__(self) -> None:
        order = [(chunk.vp_stage, chunk.pp_rank) for chunk in self.chunks]
        if order != [(vp, pp) for vp in range(self.vp_size) for pp in range(self.pp_size)]:
            raise ValueError(f"chunks are not in forward order: {order}")
        layers = [layer for chunk in self.chunks for layer in chunk.layers]
        if layers != list(range(len(layers))):
            raise ValueError(f"layers do not ascend from 0 without a gap: {layers}")

    @property
    def num_layers(self) -> int:
        """Decoder layers of all chunks."""
        return sum(len(chunk.layers) for chunk in self.chunks)

    @property
    def mtp_standalone(self) -> bool:
        """Whether the MTP layers sit on another rank than the last one."""
        return any(chunk.mtp_layers and chunk.pp_rank != self.pp_size - 1 for chunk in self.chunks)

    def of_rank(self, pp_rank: int) -> tuple[Chunk, ...]:
        """The chunks of one pipeline rank, by vp_stage."""
        return self.chunks[pp_rank :: self.pp_size]
