"""Cross-layer index sharing: the schedule, its sources, and the pipelines it forbids."""

import random

import pytest

from slime.utils.layout import (
    IndexSharing,
    LayoutError,
    engine_stages,
    illegal_engine_starts,
    illegal_starts,
    index_sharing,
    index_sharing_of_config,
    index_sharing_of_engine,
    legal_splits,
    pipeline_layout,
)
from tests.helpers.layout_args import layout_args
from tests.helpers.upstream_source import functions_of

GLM = {"num_layers": 78, "dsa_indexer_topk": 2048, "dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3}
GLM_CONFIG = {"num_hidden_layers": 78, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3}
COMPUTING = (0, 1, 2, *range(6, 75, 4))
TYPES = ["full" if layer in COMPUTING else "shared" for layer in range(78)]


def test_glm_computes_on_21_of_78_layers():
    sharing = index_sharing(layout_args(**GLM))
    assert sharing.computing_layers == COMPUTING and len(COMPUTING) == 21
    assert [sharing.source(layer) for layer in (0, 2, 5, 6, 9, 77)] == [0, 2, 2, 6, 6, 74]


def test_without_a_frequency_every_layer_computes():
    """GLM-5 and DeepSeek-V3.2: any pipeline split is legal."""
    sharing = index_sharing(layout_args(num_layers=9, experimental_attention_variant="dsa"))
    assert sharing.computes == (True,) * 9
    assert index_sharing_of_config({"num_hidden_layers": 9, "index_topk": 8}) == sharing
    assert index_sharing(layout_args()) is None and index_sharing_of_config({"num_hidden_layers": 9}) is None


@pytest.mark.parametrize("freq", range(1, 6))
@pytest.mark.parametrize("offset", range(1, 6))
def test_the_schedule_is_megatrons(freq, offset):
    """Megatron counts layers from 1, this from 0."""
    dsa = functions_of(
        "megatron.core",
        "transformer/experimental_attention_variant/dsa.py",
        ["is_dsa_skip_topk_layer", "source_dsa_compute_layer"],
    )
    args = layout_args(
        num_layers=23, dsa_indexer_topk=8, dsa_indexer_topk_freq=freq, dsa_indexer_skip_topk_offset=offset
    )
    sharing = index_sharing(args)
    for layer in range(23):
        assert sharing.computes[layer] is not dsa.is_dsa_skip_topk_layer(layer + 1, offset, freq)
        assert sharing.source(layer) + 1 == dsa.source_dsa_compute_layer(layer + 1, offset, freq)


@pytest.mark.parametrize("pattern", [None, "FFS" * 5 + "FS"])
@pytest.mark.parametrize("offset", [1, 2, 3, 7])
@pytest.mark.parametrize("freq", [1, 2, 4])
def test_the_schedule_of_a_config_is_what_transformers_and_sglang_read(pattern, offset, freq):
    from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig

    sglang = functions_of(
        "sglang", "srt/configs/model_config.py", ["dsa_layer_skips_topk"], is_deepseek_dsa=lambda config: True
    )
    keys = {"index_topk_pattern": pattern} if pattern else {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    config = {"num_hidden_layers": 17, "index_topk": 8, **keys}
    upstream = GlmMoeDsaConfig(**config)
    mine = index_sharing_of_config(config)
    assert list(mine.computes) == [kind == "full" for kind in upstream.indexer_types]
    assert list(mine.computes) == [not sglang.dsa_layer_skips_topk(upstream, layer) for layer in range(17)]
    assert index_sharing_of_engine(config) == mine


def test_all_three_descriptions_may_stand_together():
    pattern = "FFFSSS" + "FSSS" * 18
    config = {**GLM_CONFIG, "indexer_types": TYPES, "index_topk_pattern": pattern}
    assert index_sharing_of_config(config) == index_sharing(layout_args(**GLM))


def test_engines_do_not_read_indexer_types():
    """A checkpoint with indexer_types alone: SGLang would look for an indexer in every layer."""
    config = {"num_hidden_layers": 78, "index_topk": 2048, "indexer_types": TYPES}
    assert index_sharing_of_config(config).computing_layers == COMPUTING
    assert index_sharing_of_engine(config).computes == (True,) * 78


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"indexer_types": TYPES[:-4] + ["full"] * 4}, r"index_topk_freq: disagree on layer 75 .* compute .* reuse"),
        ({"index_topk_pattern": "F" * 78}, "index_topk_pattern, index_topk_freq: disagree on layer 3"),
        (
            {"num_hidden_layers": 5, "indexer_types": TYPES},
            "describes 78 layers, num_hidden_layers is 5",
        ),
        ({"indexer_types": ["shared", *TYPES[1:]]}, "lets layer 0 reuse"),
        ({"indexer_types": ["whole", *TYPES[1:]]}, "holds whole; legal entries are full and shared"),
        ({"index_topk_pattern": "FFX" * 26}, "holds X; legal entries are F and S"),
        ({"index_skip_topk_offset": None}, "index_topk_freq=4 but no index_skip_topk_offset"),
        ({"index_skip_topk_offset": 0}, "is 0: layer 0 would reuse"),
        ({"index_topk_freq": 0}, "is 0, must be >= 1"),
        ({"index_topk_freq": "4"}, "is '4', must be an integer"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes, message):
    """Readers of the checkpoint pick different keys; wrong indices are silent garbage beyond the top-k length."""
    with pytest.raises(LayoutError, match=message):
        index_sharing_of_config({**GLM_CONFIG, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dsa_indexer_skip_topk_offset": 0}, "--dsa-indexer-topk-freq 4 but no --dsa-indexer-skip-topk-offset"),
        ({"dsa_indexer_skip_topk_offset": -1}, "is -1: layer 0 would reuse"),
        ({"dsa_indexer_topk_freq": 0}, "is 0, must be >= 1"),
    ],
)
def test_flags_that_give_no_schedule_are_refused(changes, message):
    with pytest.raises(LayoutError, match=message):
        index_sharing(layout_args(**{**GLM, **changes}))


def test_the_first_layer_always_computes():
    with pytest.raises(ValueError, match="layer 0"):
        IndexSharing((False, True))


def glm_starts(**changes):
    """The first layers of the stages that start on a layer without an indexer."""
    args = layout_args(**GLM, **changes)
    return [chunk.layers[0] for chunk in illegal_starts(pipeline_layout(args), index_sharing(args))]


@pytest.mark.parametrize(
    "changes, starts",
    [
        ((8, 14, 16), []),
        ((4, 18, None), []),
        ((2, 38, None), []),
        ((2, 39, None), [39]),
        ((6, None, None), [13, 39, 52, 65]),
        ((13, None, None), [12, 24, 36, 48, 60, 72]),
    ],
)
def test_stages_that_start_on_a_reusing_layer_are_found(changes, starts):
    pp, first, last = changes
    found = glm_starts(
        pipeline_model_parallel_size=pp,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )
    assert found == starts


def test_virtual_stages_must_start_on_computing_layers_too():
    """Rank 1 begins legally with layer 2, its second virtual stage does not."""
    layout = "Ett|t*4|t*3|t*69L"
    assert glm_starts(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout) == [9]


def test_stages_without_layers_start_nowhere():
    """A stage for the loss alone, and an engine with more ranks than layers."""
    assert glm_starts(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*78|L") == []
    assert illegal_engine_starts(engine_stages(2, 3), IndexSharing((True, True))) == ()


def test_megatron_finds_the_same_stages():
    """Its check runs inside the stage's process after everything has started; this one before."""
    from types import SimpleNamespace

    dsa = functions_of(
        "megatron.core",
        "transformer/experimental_attention_variant/dsa.py",
        ["is_dsa_skip_topk_layer", "source_dsa_compute_layer"],
    )
    check = functions_of(
        "megatron.core",
        "models/gpt/experimental_attention_variant_module_specs.py",
        ["_validate_dsa_index_share_pipeline_split"],
        **vars(dsa),
    )._validate_dsa_index_share_pipeline_split
    rng, verdicts = random.Random(2), {True: 0, False: 0}
    for _ in range(300):
        freq, offset, counts = rng.randint(2, 5), rng.randint(1, 5), [rng.randint(1, 9) for _ in range(3)]
        args = layout_args(
            num_layers=sum(counts),
            pipeline_model_parallel_size=3,
            pipeline_model_parallel_layout="E" + "|".join("t" * count for count in counts) + "L",
            experimental_attention_variant="dsa",
            dsa_indexer_topk_freq=freq,
            dsa_indexer_skip_topk_offset=offset,
        )
        layout = pipeline_layout(args)
        mine = illegal_starts(layout, index_sharing(args))
        for chunk in layout.chunks:
            config = SimpleNamespace(**vars(args))
            try:
                check(config, chunk.layers)
                refused = False
            except RuntimeError:
                refused = True
            assert (chunk in mine) == refused
            verdicts[refused] += 1
    assert min(verdicts.values()) > 100


@pytest.mark.parametrize(
    "pp, best",
    [
        (2, [(38, 40), (42, 36)]),
        (4, [(18, 20), (22, 16)]),
        (8, [(14, 16), (18, 12)]),
        (16, [(10, 12), (14, 8)]),
        (18, [(6, 8)]),
        (20, [(2, 4)]),
        (21, []),
        (1, []),
    ],
)
def test_legal_splits_of_glm_best_first(pp, best):
    sharing = index_sharing(layout_args(**GLM))
    splits = legal_splits(sharing, 78, pp)
    assert splits[: len(best)] == best and bool(splits) == bool(best)
    for first, last in splits:
        ends = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
        assert glm_starts(pipeline_model_parallel_size=pp, **ends) == []


def test_no_split_of_glm_is_even():
    for pp in (2, 3, 6, 13, 26, 39):
        assert glm_starts(pipeline_model_parallel_size=pp), pp


def test_engine_stages_are_checked_alike():
    """Two pipeline ranks of 39 layers crash the engine; 38,40 run."""
    sharing = index_sharing(layout_args(**GLM))
    assert illegal_engine_starts(engine_stages(78, 2), sharing) == (1,)
    assert illegal_engine_starts(engine_stages(78, 2, "38,40"), sharing) == ()
