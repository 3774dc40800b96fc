"""What a pipeline layout says when it cannot be, and that what it proposes can."""

import random
import re

import pytest

from slime.utils.layout import Chunk, LayoutError, PipelineLayout, pipeline_layout
from tests.helpers.layout_args import layout_args

GLM = {"num_layers": 78, "dsa_indexer_topk": 2048, "dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3}


def refusal(**changes) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        pipeline_layout(layout_args(**changes))
    return caught.value


def test_chunks_come_in_forward_order():
    """Two virtual stages on three ranks: rank 0 holds the first and the fourth piece."""
    layout = pipeline_layout(layout_args(pipeline_model_parallel_size=3, num_virtual_stages_per_pipeline_rank=2))
    assert [(c.pp_rank, c.vp_stage, c.layers) for c in layout.chunks[:4]] == [
        (0, 0, (0, 1)),
        (1, 0, (2, 3)),
        (2, 0, (4, 5)),
        (0, 1, (6, 7)),
    ]
    assert layout.of_rank(0) == (layout.chunks[0], layout.chunks[3])
    assert layout.num_layers == 12 and not layout.mtp_standalone


def test_mtp_layers_sit_with_the_loss_or_where_the_string_says():
    last = pipeline_layout(layout_args(pipeline_model_parallel_size=2, mtp_num_layers=2)).chunks
    assert [(c.mtp_layers, c.head) for c in last] == [((), False), ((0, 1), True)]
    text = {"pipeline_model_parallel_layout": "Et*6|t*6|m|L", "pipeline_model_parallel_size": 4}
    alone = pipeline_layout(layout_args(mtp_num_layers=1, **text))
    assert alone.mtp_standalone and alone.chunks[2] == Chunk(2, 0, (), False, False, (0,))


def test_accounted_embedding_and_loss_take_the_place_of_a_layer():
    accounts = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    layout = pipeline_layout(layout_args(num_layers=10, pipeline_model_parallel_size=4, **accounts))
    assert [len(chunk.layers) for chunk in layout.chunks] == [2, 3, 3, 2]


def test_a_layout_with_a_gap_cannot_be_built():
    with pytest.raises(ValueError, match="without a gap"):
        PipelineLayout((Chunk(0, 0, (0, 2), True, True, ()),), 1, 1)


@pytest.mark.parametrize(
    "changes, says, try_",
    [
        (
            {"num_layers": 61, "pipeline_model_parallel_size": 4},
            "61 layers do not divide into 4 equal stages",
            "--decoder-last-pipeline-num-layers 16",
        ),
        (
            {"pipeline_model_parallel_size": 5, "decoder_first_pipeline_num_layers": 3},
            "12 layers - 3 on the first stage = 9 do not divide into 4 equal stages",
            "--decoder-first-pipeline-num-layers",
        ),
        (
            {"num_layers": 94, "pipeline_model_parallel_size": 4, "account_for_loss_in_pipeline_split": True},
            "94 layers + 1 for the loss = 95 do not divide into 4 equal stages",
            "--pipeline-model-parallel-size 1",
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "decoder_first_pipeline_num_layers": 5,
                "decoder_last_pipeline_num_layers": 6,
            },
            "12 layers - 5 on the first stage - 6 on the last stage = 1, but no stage is left",
            "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6",
        ),
        (
            {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2},
            "2 does not divide the 3 layers of a pipeline stage",
            "--num-layers-per-virtual-pipeline-stage 1",
        ),
        (
            {
                "pipeline_model_parallel_size": 3,
                "num_virtual_stages_per_pipeline_rank": 2,
                "decoder_last_pipeline_num_layers": 4,
            },
            "",
            None,
        ),
        ({"num_layers": 2, "pipeline_model_parallel_size": 3}, "2 layers do not divide into 3", "-size 2"),
        (
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 5},
            "5 does not divide the 6 layers",
            "--num-virtual-stages-per-pipeline-rank 3",
        ),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "2 virtual stages need --pipeline-model-parallel-size >= 2", ""),
        (
            {"pipeline_model_parallel_layout": "Et*11L"},
            "11 decoder layers (t), --num-layers is 12",
            "Et*12L",
        ),
        ({"pipeline_model_parallel_layout": "Et*12mL"}, "1 MTP layers (m), --mtp-num-layers is 0", "Et*12L"),
        ({"pipeline_model_parallel_layout": "Ex*12L"}, "holds 'x'; legal are E (embedding)", "Et*12L"),
        ({"pipeline_model_parallel_layout": "Et*99999L"}, "repeats t 99999 times", "Et*12L"),
        (
            {"pipeline_model_parallel_layout": "Et*12L", "account_for_loss_in_pipeline_split": True},
            "describes every stage already",
            "leave out --account-for-loss-in-pipeline-split",
        ),
        ({"hybrid_layer_pattern": "M-M*"}, "hybrid models", ""),
        ({"num_layers": None}, "is None, must be >= 1", ""),
    ],
)
def test_messages_carry_the_arithmetic_and_a_legal_value(changes, says, try_):
    if try_ is None:  # the legal neighbour of the cases around it
        assert pipeline_layout(layout_args(**changes)).vp_size == 2
        return
    error = refusal(**changes)
    assert says in error.says and try_ in error.try_
    assert str(error).startswith(error.flags[0])


def apply(changes: dict, error: LayoutError) -> dict:
    """`changes` with what the error proposes: flags with values, or flags to leave out."""
    proposal = error.try_ or "leave out " + " ".join(error.flags)
    names = [flag[2:].replace("-", "_") for flag in re.findall(r"--[a-z][a-z0-9-]+", proposal)]
    if proposal.startswith("leave out"):
        return {key: value for key, value in changes.items() if key not in names}
    given = dict(zip(names, proposal.split()[1::2], strict=True))
    ends = {"decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"}
    kept = changes.keys() - (ends if ends & given.keys() else set())
    return {key: changes[key] for key in kept} | {
        name: int(text) if text.isdigit() else text for name, text in given.items()
    }


def random_changes(rng: random.Random) -> dict:
    """Flags that often contradict each other; "x" stands for a flag that is not given."""
    virtual = rng.choice(["num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "x"])
    return {
        "num_layers": rng.randint(1, 40),
        "pipeline_model_parallel_size": rng.randint(1, 9),
        virtual: rng.choice([1, 2, 3]),
        rng.choice(["decoder_first_pipeline_num_layers", "x"]): rng.randint(1, 9),
        rng.choice(["decoder_last_pipeline_num_layers", "x"]): rng.randint(1, 9),
        rng.choice(["pipeline_model_parallel_layout", *"xxxx"]): rng.choice(["Et*9L", "E(t|)*3tL"]),
        rng.choice(["account_for_loss_in_pipeline_split", *"xxxxxx"]): True,
        rng.choice(["overlap_p2p_comm", *"xxxx"]): False,
        **rng.choice([{}, {key: value for key, value in GLM.items() if key != "num_layers"}]),
    }


def test_proposals_are_legal():
    """Whoever pastes what the message proposes gets through; independent faults take one proposal each."""
    rng, seen = random.Random(1), set()
    for _ in range(1500):
        first = changes = random_changes(rng)
        for _ in range(8):
            try:
                pipeline_layout(layout_args(**changes))
                break
            except LayoutError as error:
                seen.add((error.flags, error.try_.split(" ")[0]))
                changes = apply(changes, error)
        else:
            pytest.fail(f"{first} still is not legal as {changes}")
    assert len(seen) > 15, seen


def test_the_proposed_split_of_a_model_that_shares_indices_starts_on_computing_layers():
    error = refusal(**GLM, pipeline_model_parallel_size=8)
    assert error.try_ == "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16"
