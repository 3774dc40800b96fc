"""Name tables of Qwen3-Next and Qwen3.5: the order of rows inside fused tensors, and the prediction layers' names."""

from argparse import Namespace

import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf import family_of
from slime.backends.megatron_utils.megatron_to_hf.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from slime.backends.megatron_utils.megatron_to_hf.qwen3_next import QWEN3_NEXT
from slime.backends.megatron_utils.megatron_to_hf.sharding import merge_shards, split_shards

ARGS = Namespace(
    num_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=3,
    linear_value_head_dim=5,
)
KEYS, VALUES, HEADS = 2 * 3, 6 * 5, 6
ROWS = 2 * KEYS + 2 * VALUES + 2 * HEADS
IN_PROJ = "decoder.layers.1.self_attention.in_proj.weight"


def _labelled_rows():
    """in_proj whose single column says what each row is: (part, key head, number in the head)."""
    labels = [("q", h, i) for h in range(2) for i in range(3)] + [("k", h, i) for h in range(2) for i in range(3)]
    labels += [("v", h, i) for h in range(2) for i in range(15)] + [("z", h, i) for h in range(2) for i in range(15)]
    labels += [("b", h, i) for h in range(2) for i in range(3)] + [("a", h, i) for h in range(2) for i in range(3)]
    return torch.arange(ROWS)[:, None], labels


def test_qwen3_next_projections_go_by_key_head():
    """All of a key head's queries, keys, values and gates stand together in the checkpoint."""
    rows, labels = _labelled_rows()
    (first, qkvz), (second, ba) = QWEN3_NEXT.convert(ARGS, IN_PROJ, rows)
    assert first == "model.layers.1.linear_attn.in_proj_qkvz.weight"
    assert second == "model.layers.1.linear_attn.in_proj_ba.weight"
    sizes = {"q": 3, "k": 3, "v": 15, "z": 15}
    wanted = [(part, head, i) for head in range(2) for part, size in sizes.items() for i in range(size)]
    assert [labels[row] for row in qkvz.flatten()] == wanted
    assert [labels[row] for row in ba.flatten()] == [(p, h, i) for h in range(2) for p in "ba" for i in range(3)]
    assert torch.equal(QWEN3_NEXT.restore(ARGS, IN_PROJ, [qkvz, ba]), rows)


def test_qwen3_5_projections_go_by_part():
    """Queries, keys and values in one tensor, gates, write strengths and decays in one each."""
    rows, labels = _labelled_rows()
    pairs = QWEN3_5_TEXT.convert(ARGS, IN_PROJ, rows)
    parts = {name.split(".")[-2]: [labels[row][0] for row in tensor.flatten()] for name, tensor in pairs}
    assert {name: "".join(dict.fromkeys(found)) for name, found in parts.items()} == {
        "in_proj_qkv": "qkv",
        "in_proj_z": "z",
        "in_proj_b": "b",
        "in_proj_a": "a",
    }
    assert torch.equal(QWEN3_5_TEXT.restore(ARGS, IN_PROJ, [tensor for _, tensor in pairs]), rows)


@pytest.mark.parametrize("family", [QWEN3_NEXT, QWEN3_5, QWEN3_5_TEXT])
@pytest.mark.parametrize("name", ["in_proj", "conv1d"])
def test_each_rank_holds_the_same_heads_of_every_part(family, name):
    """Cut in one piece, the first of two ranks would hold all queries and keys and no decay."""
    rows, labels = _labelled_rows()
    if name == "conv1d":
        rows = rows[: 2 * KEYS + VALUES]
    blocks = family.tp_blocks(ARGS, f"decoder.layers.1.self_attention.{name}.weight")
    shards = split_shards(rows, 0, 2, blocks)
    for head, shard in enumerate(shards):
        assert {labels[row][1] for row in shard.flatten()} == {head}
    assert torch.equal(merge_shards(shards, 0, blocks), rows)


def test_prediction_layers_read_embedding_and_hidden_state():
    """Megatron's eh_proj takes the embedding first; Qwen3-Next's checkpoint the hidden state, Qwen3.5's not."""
    halves = torch.cat((torch.full((3, 3), 1.0), torch.full((3, 3), 2.0)), dim=1)  # embedding, hidden state
    [(name, tensor)] = QWEN3_NEXT.convert(ARGS, "mtp.layers.0.eh_proj.weight", halves)
    assert name == "mtp.fc.weight" and tensor[0].tolist() == [2.0] * 3 + [1.0] * 3
    [(name, tensor)] = QWEN3_5.convert(ARGS, "mtp.layers.0.eh_proj.weight", halves)
    assert name == "mtp.fc.weight" and torch.equal(tensor, halves)
    names = QWEN3_5.hf_names(ARGS, "mtp.layers.0.mtp_model_layer.self_attention.q_layernorm.weight")
    assert names == ["mtp.layers.0.self_attn.q_norm.weight"]


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("qwen3_next", QWEN3_NEXT),
        ("Qwen3_5MoeConfig", QWEN3_5),
        ("qwen3_5", QWEN3_5),
        ("qwen3_5_text", QWEN3_5_TEXT),
        ("Qwen3_5MoeTextConfig", QWEN3_5_TEXT),
    ],
)
def test_router(model, family):
    """The names of the text-only checkpoints contain those of the others."""
    assert family_of(model) is family


def test_names_beside_a_vision_tower():
    """The output layer alone stands outside the language model."""
    names = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
    assert [QWEN3_5.hf_names(ARGS, name)[0] for name in names] == [
        "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
        "lm_head.weight",
    ]
    name = "decoder.layers.3.self_attention.linear_proj.weight"
    assert QWEN3_5.hf_names(ARGS, name) == ["model.language_model.layers.3.self_attn.o_proj.weight"]
