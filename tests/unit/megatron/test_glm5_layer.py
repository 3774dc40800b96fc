"""One sparse-attention layer on the CPU: against float64 loops, and what it keeps, freezes and refuses."""

import dataclasses
import gc
import json
import weakref
from argparse import Namespace

import pytest
import torch

from tests.helpers.glm5_layer import (
    CHOOSING,
    REUSING,
    TINY,
    build_attention,
    choice_of,
    give_choice,
    make_config,
    packed,
    start_alone,
)

LENGTHS = (11, 3, 26, 8)  # ragged; 8 tokens are chosen
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def alone():
    start_alone("cpu")
    yield
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def hidden(tokens: int = TOKENS, seed: int = 5) -> torch.Tensor:
    return torch.randn(tokens, TINY.hidden_size, generator=torch.Generator().manual_seed(seed))


def run(layer, x: torch.Tensor, lengths=LENGTHS, params=None) -> torch.Tensor:
    return layer(x[:, None], None, packed_seq_params=params or packed(lengths, "cpu"))[0][:, 0]


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("neighbours", [True, False])
def test_a_packed_row_equals_float64_loops(neighbours):
    """Every token attends to the 8 best-scored tokens of its own sequence, rotated by its place in that sequence."""
    from tests.helpers.glm5_naive import attention

    layer = build_attention(
        make_config(TINY, torch.float32, "none", dsa_indexer_rope_interleaved=neighbours), CHOOSING
    )
    wanted = attention(layer, TINY, hidden().double(), LENGTHS, neighbours=neighbours)
    assert relative(run(layer, hidden()), wanted) < 1e-5
    other = attention(layer, TINY, hidden().double(), LENGTHS, neighbours=not neighbours)
    assert relative(other, wanted) > 0.05  # so that the wrong pairs would be seen


def test_six_tokens_tell_the_rotations_apart():
    """Published indexers differ in which dimensions they pair. Where all tokens are chosen nobody sees the wrong one;
    with 2 of 6 the choices differ, and each is that of its own definition."""
    from tests.helpers.glm5_naive import index_scores, rms_norm

    sizes, choices = dataclasses.replace(TINY, index_topk=2), {}
    for neighbours in (True, False):
        config = make_config(sizes, torch.float32, "none", dsa_indexer_rope_interleaved=neighbours)
        layer, params = build_attention(config, CHOOSING), packed([6], "cpu")
        run(layer, hidden(6), params=params)
        x = hidden(6).double()
        compressed = rms_norm(x @ layer.linear_q_down_proj.weight.double().t(), 1.0, config.layernorm_epsilon)
        scores = index_scores(layer.core_attention.indexer, sizes, x, compressed, neighbours, config.rotary_base)
        wanted = [sorted(scores[t, : t + 1].topk(min(2, t + 1)).indices.tolist()) for t in range(6)]
        got = [sorted(j for j in tokens if j >= 0) for tokens in choice_of(params)[0].tolist()]
        assert got == wanted
        choices[neighbours] = got
    assert choices[True] != choices[False]


def test_short_sequences_are_dense_latent_attention():
    """Up to index_topk tokens there is nothing to choose, whatever the indexer says."""
    from tests.helpers.glm5_naive import attention

    layer, lengths = build_attention(make_config(TINY, torch.float32, "none"), CHOOSING), (8, 5, 1, 7)
    wanted = attention(layer, TINY, hidden(21).double(), lengths, choose=False)
    assert relative(run(layer, hidden(21), lengths), wanted) < 1e-5
    longer = attention(layer, TINY, hidden(21).double(), (21,), choose=False)
    assert relative(run(layer, hidden(21), (21,)), longer) > 0.05


def test_bfloat16_keeps_head_weights_exact():
    """The indexer's head weights come out of bfloat16 numbers in float32, as in the engine; rounded to bfloat16 they
    decide otherwise between nearly equal tokens."""
    layer = build_attention(make_config(TINY, torch.bfloat16, "none"), CHOOSING)
    projection, x = layer.core_attention.indexer.linear_weights_proj, hidden().bfloat16()[:, None]
    out, _ = projection(x)
    wanted = x.double() @ projection.weight.double().t()
    assert out.dtype == torch.float32 and relative(out, wanted) < 1e-6
    assert relative(out.bfloat16(), wanted) > 1e-4
    *_, weights = layer.core_attention.indexer.forward_before_topk(
        x, torch.randn(TOKENS, 1, TINY.q_lora_rank).bfloat16(), packed(LENGTHS, "cpu")
    )
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
def test_a_choice_is_kept_until_its_last_reader(training):
    """Without recomputation nothing of it is left on the micro-batch after the last layer that reuses it."""
    config = make_config(TINY, torch.float32, "none", num_layers=8)
    layers = {number: build_attention(config, number) for number in (3, 4, 5, 6, 7)}
    params, x = packed(LENGTHS, "cpu"), hidden()
    with torch.no_grad():
        for number, layer in layers.items():
            layer.train(training)
            run(layer, x, params=params)
            if number == 3:
                seen = weakref.ref(choice_of(params))
            gc.collect()
            assert (seen() is not None) == (number < 6), number
    assert list(vars(params)["_dsa_index_share_topk_holder"]) == [7]


def test_a_choice_is_kept_for_the_layers_that_attend_again():
    """With recomputation backward asks for it, from the last layer to the first: it stays until layer 3 has run
    again, and the gradients are those without recomputation."""
    gradients = []
    for again in (True, False):
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]} if again else {}
        config = make_config(TINY, torch.float32, "none", num_layers=8, **recompute)
        params, x = packed(LENGTHS, "cpu"), hidden().requires_grad_()
        y = x
        for number in (3, 4, 5, 6, 7):
            y = y + run(build_attention(config, number), y, params=params)
        holder = vars(params)["_dsa_index_share_topk_holder"]
        assert sorted(holder) == ([3, 7] if again else [7])
        y.square().sum().backward()
        assert sorted(holder) == ([3] if again else [7])
        gradients.append(x.grad)
    assert relative(gradients[0], gradients[1].double()) < 1e-6


def test_a_sharing_layer_has_no_indexer_and_reads_the_layer_before():
    config = make_config(TINY, torch.float32, "none")
    choosing, reusing = build_attention(config, CHOOSING), build_attention(config, REUSING)
    assert choosing.core_attention.indexer is not None and reusing.core_attention.indexer is None
    params = packed(LENGTHS, "cpu")
    run(choosing, hidden(), params=params)
    mine = run(reusing, hidden(), params=params)
    other = packed(LENGTHS, "cpu")
    first_tokens = torch.arange(8).expand(1, TOKENS, 8).clone()
    give_choice(other, first_tokens)
    assert relative(run(reusing, hidden(), params=other), mine.double()) > 0.05


def test_rows_must_be_packed():
    """Megatron would keep the choice on the configuration, and the next batch would reuse it."""
    layer = build_attention(make_config(TINY, torch.float32, "none"), CHOOSING)
    with pytest.raises(ValueError, match="layer 3: sparse attention runs on packed sequences only"):
        layer(hidden()[:, None], None)


def test_the_indexer_is_frozen_unless_its_loss_trains_it():
    for coefficient, trained in ((None, False), (0.0, False), (0.3, True)):
        config = make_config(TINY, torch.float32, "none", dsa_indexer_loss_coeff=coefficient)
        layer = build_attention(config, CHOOSING)
        frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
        assert frozen == (set() if trained else {n for n, _ in layer.named_parameters() if ".indexer." in n})


def test_scores_of_fused_kernels_take_bounded_memory():
    """Rows at a time shrink with the length: 4 bytes x rows x keys stay below 512 MiB."""
    from slime_plugins.models.glm5.attention import SCORE_BYTES

    layer = build_attention(make_config(TINY, torch.float32, "none"), CHOOSING)
    run(layer, hidden())
    assert layer.core_attention.fused_indexer_block_size == 8192
    rows = [min(8192, SCORE_BYTES // (4 * keys)) for keys in (2**14, 2**17, 2**20)]
    assert rows == [8192, 1024, 128]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experimental_attention_variant": None}, "this layer spec is for dsa"),
        ({"dsa_indexer_topk": None}, "--dsa-indexer-topk None: must be >= 1"),
        ({"dsa_indexer_k_norm_epsilon": None}, "have --dsa-indexer-k-norm-epsilon 1e-6"),
        ({"dsa_indexer_rotate_activation": True}, "pass --no-dsa-indexer-rotate-activation"),
        ({"dsa_indexer_scoring_relu": False}, "leave it out"),
        ({"dsa_indexer_skip_topk_offset": 0}, "--dsa-indexer-topk-freq 4 but no --dsa-indexer-skip-topk-offset"),
        ({"mtp_num_layers": 2}, "--mtp-use-repeated-layer, or use --mtp-num-layers 1"),
    ],
)
def test_the_provider_refuses(changes, words):
    from slime_plugins.models.glm5.glm5 import get_glm5_spec

    config = make_config(TINY, torch.float32, "none")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=words):
        get_glm5_spec(Namespace(), config, None)


def test_the_provider_refuses_another_schedule_or_rotation_than_the_checkpoints(tmp_path):
    from slime_plugins.models.glm5.glm5 import get_glm5_spec
    from tests.helpers.tiny_models import _config

    told = _config("glm5_2", {}).to_dict()
    path = tmp_path / "config.json"

    def message(config=None, **changes) -> str:
        path.write_text(json.dumps(told | changes))
        values = {"num_layers": 8, "moe_layer_freq": 1} | (config or {})
        try:
            get_glm5_spec(
                Namespace(hf_checkpoint=str(tmp_path)), make_config(TINY, torch.float32, "none", **values), None
            )
        except ValueError as error:
            return str(error)
        return ""

    assert message() == ""
    assert "--dsa-indexer-rope-interleaved True" in message(indexer_rope_interleave=False)
    assert "--dsa-indexer-n-heads 32: " in message(index_n_heads=16)
    types = ["full"] * 8
    text = message({"dsa_indexer_skip_topk_offset": 2})
    assert "layer 2 (counted from 0) has an indexer of its own, by the flags the opposite" in text
    assert "disagree on layer 3" in message(indexer_types=types)  # the file contradicts itself
    assert "layer 3 (counted from 0) has an indexer" in message(
        indexer_types=types, index_topk_freq=None, index_skip_topk_offset=None
    )


def test_the_provider_names_legal_splits(monkeypatch):
    from megatron.core import parallel_state

    from slime_plugins.models.glm5.glm5 import get_glm5_spec

    config = make_config(TINY, torch.float32, "none", num_layers=8)
    config.pipeline_model_parallel_size = 2
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"layer 5 reuses .* layer 3.* 2 stages: 2/6, 6/2, 1/7"):
        get_glm5_spec(Namespace(), config, None)


def prediction_layer(config, args=None):
    """The attention of the layer of multi-token prediction, with the weights of decoder layer 1."""
    from megatron.core.transformer.spec_utils import build_module

    from slime_plugins.models.glm5.glm5 import get_glm5_spec

    spec = get_glm5_spec(args or Namespace(), config, None).prediction_layer.submodules.self_attention
    attention = build_module(spec, config=config, layer_number=1)
    attention.load_state_dict(build_attention(config, 1).state_dict())
    return attention


def test_the_prediction_layer_chooses_for_itself():
    """Multi-token prediction's layer has an indexer, and leaves the decoder layers' choices alone: Megatron counts it
    as layer 1, whose choice others may still ask for."""
    config = make_config(TINY, torch.float32, "none", dsa_indexer_skip_topk_offset=1)
    attention, twin = prediction_layer(config), build_attention(config, 1)
    params, x = packed(LENGTHS, "cpu"), hidden()
    run(twin, hidden(seed=6), params=params)
    before = vars(params)["_dsa_index_share_topk_holder"][1]
    out = run(attention, x, params=params)
    assert vars(params)["_dsa_index_share_topk_holder"] == {1: before}
    assert torch.equal(out, run(twin, x))


@pytest.mark.parametrize("freq", [4, 1])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_prediction_layer_that_runs_again_keeps_its_choice(tmp_path, recompute, freq):
    """Where config.json says so, three runs on three inputs attend to what the first one chose; the choice is gone
    after the last run, or, if backward computes attention again, when it has done so for the first run. Another
    micro-batch chooses anew."""
    from types import SimpleNamespace

    from slime.backends.megatron_utils.mtp import Run
    from tests.helpers.tiny_models import _config

    told = _config("glm5_2", {"num_hidden_layers": 4, "index_topk_freq": freq}).to_dict()
    told.pop("indexer_types", None)
    again = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]} if recompute else {}
    config = make_config(TINY, torch.float32, "none", dsa_indexer_topk_freq=freq, moe_layer_freq=1, **again)
    inputs = [hidden(seed=seed).requires_grad_() for seed in (1, 2, 3)]

    def runs(shared: bool, row: slice) -> tuple[list[torch.Tensor], SimpleNamespace]:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(told | {"index_share_for_mtp_iteration": shared}))
        layer = prediction_layer(config, Namespace(hf_checkpoint=str(tmp_path)))
        kept, outs, params = SimpleNamespace(), [], packed(LENGTHS, "cpu")
        for index, x in enumerate(inputs[row]):
            outs.append(run(layer, x, params=Run(index, len(inputs[row]), kept).of(params)))
            assert bool(vars(kept)) == (shared and (recompute or index < len(inputs[row]) - 1))
        assert not any("index_share" in name for name in vars(params))
        return outs, kept

    alone = [runs(True, slice(i, i + 1))[0][0] for i in range(3)]
    anew, _ = runs(False, slice(0, 3))
    assert all(torch.equal(a, b) for a, b in zip(anew, alone, strict=True))
    once, kept = runs(True, slice(0, 3))
    assert torch.equal(once[0], alone[0]) and all(relative(once[i], alone[i].double()) > 0.05 for i in (1, 2))
    sum(out.square().sum() for out in once).backward()
    assert not vars(kept)
    if recompute:
        config.recompute_granularity, recompute = None, False
        plain = torch.autograd.grad(sum(out.square().sum() for out in runs(True, slice(0, 3))[0]), inputs)
        assert all(relative(x.grad, wanted.double()) < 1e-6 for x, wanted in zip(inputs, plain, strict=True))


@pytest.mark.parametrize(
    ("changes", "accelerator", "missing", "wanted"),
    [
        ({}, "cuda", (), "tilelang"),
        ({}, "cpu", (), "none"),
        ({}, "cuda", ("tilelang",), "cudnn"),
        ({}, "cuda", ("tilelang", "cudnn"), "none"),
        ({"kv_lora_rank": 256}, "cuda", (), "none"),
        ({"bf16": False}, "cuda", (), "none"),
        ({"num_attention_heads": 192, "tensor_model_parallel_size": 4}, "cuda", (), "none"),
        ({"dsa_indexer_topk": 2000}, "cuda", (), "none"),
    ],
)
def test_the_best_kernels_that_fit_are_chosen(monkeypatch, changes, accelerator, missing, wanted):
    """By device, model and installed packages; what the user names is taken, or refused with the reason."""
    from slime.backends.megatron_utils import dsa_kernels

    monkeypatch.setattr(dsa_kernels, "missing_packages", lambda name: ["package"] if name in missing else [])
    args = Namespace(
        bf16=True, kv_lora_rank=512, qk_pos_emb_head_dim=64, num_attention_heads=64, tensor_model_parallel_size=4,
        dsa_indexer_topk=2048, dsa_kernel_backend="none",
    )  # fmt: skip
    for name, value in changes.items():
        setattr(args, name, value)
    assert dsa_kernels.choose_kernels(args, accelerator, asked=False) == wanted
    assert dsa_kernels.choose_kernels(args, accelerator, asked=True) == "none"
    args.dsa_kernel_backend = "tilelang"
    if wanted == "tilelang":
        assert dsa_kernels.choose_kernels(args, accelerator, asked=True) == "tilelang"
    else:
        with pytest.raises(ValueError, match="--dsa-kernel-backend tilelang: .*leave it out"):
            dsa_kernels.choose_kernels(args, accelerator, asked=True)


def test_the_benchmark_prints_a_table(capsys):
    from tests.benchmarks import bench_dsa_layer

    bench_dsa_layer.main(["--tiny", "--tokens", "16", "--repeats", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[-2:]] == [["16", "none", "choosing"], ["16", "none", "reusing"]]
