"""Sparse attention's fused kernels on a GPU, against the plain torch path."""

import dataclasses

import pytest
import torch

from tests.helpers.glm5_layer import (
    CHOOSING,
    REUSING,
    LayerSizes,
    build_attention,
    choice_of,
    give_choice,
    make_config,
    packed,
    start_alone,
)

pytestmark = pytest.mark.gpu
SIZES = LayerSizes(hidden_size=512, heads=16, q_lora_rank=256, index_topk=256)
LENGTHS = (640, 64, 320)  # ragged; 256 tokens are chosen
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module", params=["tilelang", "cudnn"])
def kernels(request):
    from slime.backends.megatron_utils.dsa_kernels import missing_packages

    start_alone("cuda")
    missing = missing_packages(request.param)
    if missing:
        pytest.skip(f"{request.param} needs {', '.join(missing)}")
    return request.param


def hidden(tokens: int = TOKENS, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tokens, 1, SIZES.hidden_size, generator=generator, device="cuda").bfloat16().requires_grad_()


def both_ways(kernels: str, number: int) -> dict[str, torch.nn.Module]:
    return {name: build_attention(make_config(SIZES, torch.bfloat16, name), number) for name in (kernels, "none")}


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def test_the_same_tokens_are_chosen(kernels):
    """Apart from nearly equal scores at the edge, where kernels add in another order."""
    sets = []
    for layer in both_ways(kernels, CHOOSING).values():
        params = packed(LENGTHS, "cuda")
        with torch.no_grad():
            layer(hidden(), None, packed_seq_params=params)
        sets.append([{j for j in row if j >= 0} for row in choice_of(params)[0].tolist()])
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    position = 0
    for first, length in zip(starts, LENGTHS, strict=False):
        for t in range(length):
            fused, plain = sets[0][position], sets[1][position]
            assert len(fused) == len(plain) == min(t + 1, SIZES.index_topk)
            assert min(fused) >= first and max(fused) <= position
            assert len(fused & plain) >= 0.98 * len(plain), position
            position += 1


def test_among_equal_scores_the_first_tokens_are_chosen(kernels):
    """No head has a weight, so that all scores are 0, or -0: the sign must not matter to a sort on the GPU."""
    if kernels == "cudnn":
        pytest.skip("cuDNN's kernel chooses by itself")
    for name, layer in both_ways(kernels, CHOOSING).items():
        with torch.no_grad():
            weight = layer.core_attention.indexer.linear_weights_proj.weight
            weight.copy_(torch.where(torch.arange(len(weight), device="cuda")[:, None] % 2 == 0, 0.0, -0.0))
            params = packed(LENGTHS, "cuda")
            layer(hidden(), None, packed_seq_params=params)
        chosen = choice_of(params)[0].tolist()
        firsts = [sum(LENGTHS[:i]) for i, length in enumerate(LENGTHS) for _ in range(length)]
        for t, (row, first) in enumerate(zip(chosen, firsts, strict=True)):
            wanted = range(first, min(t + 1, first + SIZES.index_topk))
            assert sorted(j for j in row if j >= 0) == list(wanted), (name, t)


def test_output_and_gradients_equal_the_plain_path(kernels):
    """The same choice given to both; the distance is bfloat16's."""
    generator = torch.Generator().manual_seed(3)
    choice = torch.full((1, TOKENS, SIZES.index_topk), -1, dtype=torch.int32)
    first = 0
    for length in LENGTHS:
        for t in range(length):
            seen = first + torch.randperm(t + 1, generator=generator)[: SIZES.index_topk]
            choice[0, first + t, : len(seen)] = seen.int()
        first += length
    found = {}
    for name, layer in both_ways(kernels, REUSING).items():
        params, x = packed(LENGTHS, "cuda"), hidden()
        give_choice(params, choice.cuda())
        out = layer(x, None, packed_seq_params=params)[0]
        weights = dict(layer.named_parameters())
        grads = torch.autograd.grad(out, [x, *weights.values()], hidden(seed=6).detach())
        found[name] = dict(zip(("output", "input", *weights), (out, *grads), strict=True))
    for name, wanted in found["none"].items():
        assert distance(found[kernels][name], wanted) < 2e-2, name


def test_memory_does_not_grow_with_the_square(kernels):
    """Twice the tokens take about twice the memory of forward and backward; the plain path would take four times."""
    sizes = dataclasses.replace(SIZES, index_topk=512)
    layer = build_attention(make_config(sizes, torch.bfloat16, kernels), CHOOSING)
    peaks = []
    for tokens in (8192, 8192, 16384):  # the first warms up
        x = hidden(tokens)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layer(x, None, packed_seq_params=packed([tokens], "cuda"))[0].sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - held)
    assert peaks[2] < 3 * peaks[1], peaks
