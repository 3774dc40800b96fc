"""Layout arithmetic that checks, metrics and the plan share: pure functions of the arguments."""

from slime.utils.layout.chunks import Chunk, PipelineLayout
from slime.utils.layout.engine_stages import engine_stages
from slime.utils.layout.errors import LayoutError
from slime.utils.layout.index_sharing import (
    IndexSharing,
    illegal_engine_starts,
    illegal_starts,
    index_sharing,
    index_sharing_of_config,
    index_sharing_of_engine,
    legal_splits,
    uses_sparse_attention,
)
from slime.utils.layout.moe_layers import moe_layer_pattern
from slime.utils.layout.pipeline import pipeline_layout
from slime.utils.layout.splits import balanced_counts, equal_middle_splits
from slime.utils.layout.stage_string import stage_string

__all__ = [
    "Chunk",
    "IndexSharing",
    "LayoutError",
    "PipelineLayout",
    "balanced_counts",
    "engine_stages",
    "equal_middle_splits",
    "illegal_engine_starts",
    "illegal_starts",
    "index_sharing",
    "index_sharing_of_config",
    "index_sharing_of_engine",
    "legal_splits",
    "moe_layer_pattern",
    "pipeline_layout",
    "stage_string",
    "uses_sparse_attention",
]
