"""The stages of every pipeline equal Megatron's own, and what Megatron refuses is refused."""

import random

import pytest

from slime.utils.layout import LayoutError, pipeline_layout
from tests.helpers.megatron_layout import chunks_of_megatron, parse

CONFIGURATIONS = 600


def ours(argv):
    """As `chunks_of_megatron`."""
    try:
        layout = pipeline_layout(parse(argv))
    except LayoutError as error:
        return str(error)
    chunks = layout.chunks
    assert [c.embedding for c in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [c.head for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk for rank in range(layout.pp_size) for chunk in layout.of_rank(rank)] == sorted(
        chunks, key=lambda c: (c.pp_rank, c.vp_stage)
    )
    return [(c.pp_rank, c.vp_stage, list(c.layers), len(c.mtp_layers)) for c in chunks]


def random_argv(rng: random.Random) -> list[str]:
    """Pipeline flags of a model of 1 to 24 layers, about half of them legal."""
    pp, layers = rng.choice([1, 2, 2, 3, 4, 4, 5, 6]), rng.randint(1, 24)
    argv = {"--pipeline-model-parallel-size": pp}
    if rng.random() < 0.3:
        argv["--mtp-num-layers"] = rng.choice([1, 2])
    if rng.random() < 0.15:
        argv["--no-overlap-p2p-communication"] = None
    if rng.random() < 0.3:
        text = random_layout(rng, pp, layers, argv.get("--mtp-num-layers", 0))
        layers = max(1, text.count("t") + rng.choice([0, 0, 0, 0, 0, 1]))
        argv["--pipeline-model-parallel-layout"] = text
    elif rng.random() < 0.5:
        vp = rng.choice([1, 2, 2, 3])
        layers = pp * vp * rng.randint(1, 3) if rng.random() < 0.7 else layers
        flag = rng.choice(["--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"])
        argv[flag] = vp
    if rng.random() < (0.05 if "--pipeline-model-parallel-layout" in argv else 0.4) and pp > 1:
        multiple = argv.get("--num-virtual-stages-per-pipeline-rank", 1)
        ends = rng.sample(["first", "last"], rng.choice([1, 2]))
        counts = [multiple * rng.randint(1, 4) for _ in ends]
        argv |= {f"--decoder-{end}-pipeline-num-layers": n for end, n in zip(ends, counts, strict=True)}
        if rng.random() < 0.7:
            layers = sum(counts) + (pp - len(ends)) * multiple * rng.randint(1, 3)
    if rng.random() < (0.03 if len(argv) > 3 else 0.3):
        for flag in rng.sample(["embedding", "loss"], rng.choice([1, 2])):
            argv[f"--account-for-{flag}-in-pipeline-split"] = None
            layers = max(1, layers - 1)
    argv["--num-layers"] = layers
    return [str(token) for pair in argv.items() for token in pair if token is not None]


def random_layout(rng: random.Random, pp: int, layers: int, mtp: int) -> str:
    """A layout string, often with one thing wrong."""
    stages = pp * rng.choice([1, 1, 2])
    cuts = sorted(rng.choices(range(layers + 1), k=stages - 1))
    counts = [end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    texts = ["t" * count for count in counts]
    texts[0] = "E" + texts[0]
    where = rng.choice([-1, -1, -1, rng.randrange(stages)])
    texts[where] += "m" * mtp
    texts[-1] += "L"
    text = "|".join(texts)
    if rng.random() < 0.25:
        at = rng.randrange(len(text))
        text = rng.choice([text[:at] + text[at + 1 :], text[:at] + rng.choice("EtmL|x,") + text[at:]])
    return text


def test_random_pipelines_equal_megatron():
    """Layer for layer and refusal for refusal; hundreds of each, so that neither side is vacuous."""
    rng, legal, illegal = random.Random(0), 0, 0
    for _ in range(CONFIGURATIONS):
        argv = random_argv(rng)
        mine, theirs = ours(argv), chunks_of_megatron(argv)
        if isinstance(theirs, str):
            assert isinstance(mine, str), f"{argv}: Megatron refuses it ({theirs}), the plan makes {mine}"
            illegal += 1
        else:
            assert mine == theirs, f"{argv}"
            legal += 1
    assert legal > 200 and illegal > 150, (legal, illegal)


@pytest.mark.parametrize(
    "argv",
    [
        "--num-layers 78 --pipeline-model-parallel-size 8 --decoder-first-pipeline-num-layers 14"
        " --decoder-last-pipeline-num-layers 16 --mtp-num-layers 1",
        "--num-layers 61 --pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1",
        "--num-layers 61 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 13",
        "--num-layers 94 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split"
        " --account-for-loss-in-pipeline-split",
        "--num-layers 61 --mtp-num-layers 1 --pipeline-model-parallel-size 16"
        " --pipeline-model-parallel-layout Et*3|(tt|)*29,m|L",
        "--num-layers 8 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|(t|)*2,(tt|)*2ttL",
        "--num-layers 4 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E||t*4|L",
        "--num-layers 5 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|(t)*2t*3L",
    ],
)
def test_pipelines_of_large_models_equal_megatron(argv):
    theirs = chunks_of_megatron(argv.split())
    assert not isinstance(theirs, str) and ours(argv.split()) == theirs


@pytest.mark.parametrize(
    "argv",
    [
        "--num-layers 8 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E((t|)*2)*2L",
        "--num-layers 8 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|()*2ttttL",
        "--num-layers 8 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|tt(tt)L",
        "--num-layers 4 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2"
        " --decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
    ],
)
def test_oddities_that_megatron_refuses_are_refused(argv):
    """Nested groups, an empty group, a group without a number, and interleaving without a middle stage."""
    assert isinstance(chunks_of_megatron(argv.split()), str) and isinstance(ours(argv.split()), str)


def test_an_uneven_flag_without_pipeline_is_refused_though_megatron_tolerates_it():
    argv = "--num-layers 4 --decoder-first-pipeline-num-layers 4".split()
    assert chunks_of_megatron(argv) == [(0, 0, [0, 1, 2, 3], 0)]
    assert "has no meaning with --pipeline-model-parallel-size 1" in ours(argv)
