"""Which decoder layers compute the sparse attention's top-k indices and which reuse those of a layer before.

The indices do not cross pipeline stages, in trainers and engines alike: every stage starts on a computing layer.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.utils.layout.chunks import Chunk, PipelineLayout
from slime.utils.layout.errors import LayoutError
from slime.utils.layout.splits import equal_middle_splits


@dataclass(frozen=True)
class IndexSharing:
    """computes[i]: decoder layer i (0-based) has an indexer of its own; else it reuses the top-k of `source(i)`."""

    computes: tuple[bool, ...]

    def __post_init__(self) -> None:
        if self.computes and not self.computes[0]:
            raise ValueError("layer 0 has no layer before it whose top-k it could reuse")

    @property
    def computing_layers(self) -> tuple[int, ...]:
        """The layers with an indexer, ascending."""
        return tuple(layer for layer, computes in enumerate(self.computes) if computes)

    def source(self, layer: int) -> int:
        """The nearest computing layer at or before `layer`."""
        return next(i for i in range(layer, -1, -1) if self.computes[i])


def uses_sparse_attention(a: Namespace) -> bool:
    """Whether Megatron's arguments describe a model with DeepSeek sparse attention (DSA)."""
    return a.experimental_attention_variant == "dsa" or a.dsa_indexer_topk is not None


def index_sharing(a: Namespace) -> IndexSharing | None:
    """The schedule that Megatron's --dsa-indexer-topk-freq and --dsa-indexer-skip-topk-offset give; None without DSA.

    Layer l, counted from 1, computes iff max(l - offset, 0) % freq == 0. Raises LayoutError for a frequency without an
    offset: Megatron reads 1 then, other readers 2, and the checkpoint has indexer weights for one of them only.
    """
    if not uses_sparse_attention(a):
        return None
    freq, offset = a.dsa_indexer_topk_freq, a.dsa_indexer_skip_topk_offset
    names = ("--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset")
    return IndexSharing(_schedule(a.num_layers, freq, offset or None, names))


def index_sharing_of_config(config: Mapping[str, Any]) -> IndexSharing | None:
    """The schedule of a config.json (its language-model part); None for a model without sparse attention.

    Three keys may tell it: indexer_types ("full" or "shared" per layer), index_topk_freq with index_skip_topk_offset,
    index_topk_pattern ("F" or "S" per layer). Raises LayoutError if those present disagree, do not describe
    num_hidden_layers layers, or let the first layer reuse indices.
    """
    if config.get("index_topk") is None:
        return None
    layers = config["num_hidden_layers"]
    told = {
        "indexer_types": _listed(config, "indexer_types", layers, {"full": True, "shared": False}),
        "index_topk_pattern": _listed(config, "index_topk_pattern", layers, {"F": True, "S": False}),
        "index_topk_freq": _frequency_of_config(config),
    }
    schedules = {key: computes for key, computes in told.items() if computes is not None}
    if not schedules:
        return IndexSharing((True,) * layers)
    (first_key, first), *others = schedules.items()
    for key, computes in others:
        if computes != first:
            layer = next(i for i in range(layers) if computes[i] != first[i])
            says = (
                f"disagree on layer {layer} (counted from 0): {first_key} lets it {_verb(first[layer])}, "
                f"{key} lets it {_verb(computes[layer])}"
            )
            raise LayoutError((first_key, key), says, f"remove {key} or make it say what {first_key} says")
    return IndexSharing(first)


def index_sharing_of_engine(config: Mapping[str, Any]) -> IndexSharing | None:
    """What SGLang 0.5.17 reads from a config.json: the pattern, else frequency and offset; never indexer_types.

    It differs from `index_sharing_of_config` for a checkpoint that has indexer_types alone.
    """
    without_types = {key: value for key, value in config.items() if key != "indexer_types"}
    return index_sharing_of_config(without_types)


def shares_prediction_choice(config: Mapping[str, Any]) -> bool:
    """Whether a prediction layer that runs several times reuses its first run's top-k, by config.json."""
    return bool(config.get("index_share_for_mtp_iteration"))


def illegal_starts(layout: PipelineLayout, sharing: IndexSharing) -> tuple[Chunk, ...]:
    """The (virtual) stages of a trainer that start on a layer without an indexer, in forward order."""
    return tuple(chunk for chunk in layout.chunks if chunk.layers and not sharing.computes[chunk.layers[0]])


def illegal_engine_starts(stages: Sequence[range], sharing: IndexSharing) -> tuple[int, ...]:
    """The pipeline ranks of an engine (of `engine_stages`) that start on a layer without an indexer."""
    return tuple(rank for rank, layers in enumerate(stages) if layers and not sharing.computes[layers[0]])


def legal_splits(sharing: IndexSharing | None, num_layers: int, pp: int) -> list[tuple[int, int]]:
    """(first, last) for --decoder-first/last-pipeline-num-layers with equal stages between; most even first.

    Every stage starts on a computing layer; None stands for a model where each layer computes. Empty for pp < 2.
    """
    return equal_middle_splits(num_layers, pp, sharing.computes if sharing else None)


def _schedule(layers: int, freq: int, offset: int | None, names: tuple[str, str]) -> tuple[bool, ...]:
    """computes[] of a frequency and an offset; names: what the user calls the two."""
    freq_name, offset_name = names
    given = f"{freq_name}{' ' if freq_name.startswith('-') else '='}{freq}"
    if freq < 1:
        raise LayoutError((freq_name,), f"is {freq}, must be >= 1 (1: every layer computes its top-k)")
    if freq == 1:
        return (True,) * layers
    if offset is None:
        missing = f"no {offset_name}" + (" (or 0, its default)" if offset_name.startswith("-") else "")
        says = f"{given} but {missing}, which some readers take for 1, others for 2; GLM-5.2 has 3"
        raise LayoutError((freq_name, offset_name), says, f"{offset_name}{given[len(freq_name)]}3")
    if offset < 1:
        says = f"is {offset}: layer 0 would reuse the top-k of a layer before it, and there is none; must be >= 1"
        raise LayoutError((offset_name,), says)
    return tuple(max(layer + 1 - offset, 0) % freq == 0 for layer in range(layers))


def _frequency_of_config(config: Mapping[str, Any]) -> tuple[bool, ...] | None:
    freq, offset = config.get("index_topk_freq"), config.get("index_skip_topk_offset")
    if freq is None:
        return None
    for name, value in (("index_topk_freq", freq), ("index_skip_topk_offset", offset)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise LayoutError((name,), f"is {value!r}, must be an integer")
    return _schedule(config["num_hidden_layers"], freq, offset, ("index_topk_freq", "index_skip_topk_offset"))


def _listed(config: Mapping[str, Any], key: str, layers: int, words: Mapping[str, bool]) -> tuple[bool, ...] | None:
    entries = config.get(key)
    if entries is None:
        return None
    if not isinstance(entries, str | list):
        raise LayoutError((key,), f"is {entries!r}, must have an entry a layer: {' or '.join(words)}")
    unknown = sorted({str(entry) for entry in entries if str(entry) not in words})
    if unknown:
        raise LayoutError((key,), f"holds {', '.join(unknown)}; legal entries are {' and '.join(words)}")
    if len(entries) != layers:
        raise LayoutError((key,), f"describes {len(entries)} layers, num_hidden_layers is {layers}")
    computes = tuple(words[entry] for entry in entries)
    if computes and not computes[0]:
        raise LayoutError((key,), "lets layer 0 reuse the top-k of a layer before it, and there is none")
    return computes


def _verb(computes: bool) -> str:
    return "compute its top-k" if computes else "reuse an earlier layer's"
