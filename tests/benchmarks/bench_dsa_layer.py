"""Time and memory of one sparse-attention layer of GLM-5.2's shape, by kernel backend and length of the packed row.

    python tests/benchmarks/bench_dsa_layer.py [--tokens 4096 16384 32768] [--kernels tilelang cudnn none] [--heads 64]
    python tests/benchmarks/bench_dsa_layer.py --tiny      # small sizes, on the CPU

Needs a GPU, apart from --tiny. A "choosing" layer has an indexer, a "reusing" one takes an earlier layer's tokens.
Times are medians in milliseconds; TFLOP/s count matrix products alone, and "of peak" compares them with a product of
two 8192 x 8192 matrices in the same run. Memory is what the pass takes at its peak beyond weights and input.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers.glm5_layer import (  # noqa: E402
    CHOOSING,
    REUSING,
    TINY,
    LayerSizes,
    build_attention,
    choice_of,
    give_choice,
    make_config,
    packed,
    start_alone,
)

COLUMNS = "{:>8} {:>9} {:>9} {:>11} {:>9} {:>9} {:>11} {:>9} {:>9}"
DENSE_LIMIT = 4096  # tokens up to which the plain path, whose memory grows with their square, is tried


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the packed row, one sequence each")
    parser.add_argument("--kernels", nargs="+", choices=("tilelang", "cudnn", "none"))
    parser.add_argument("--heads", type=int, help="attention heads of this rank (64 / tensor parallel)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small sizes in float32 on the CPU")
    options = parser.parse_args(argv)

    import torch

    start_alone("cpu" if options.tiny else "cuda")
    device, dtype = ("cpu", torch.float32) if options.tiny else ("cuda", torch.bfloat16)
    sizes = TINY if options.tiny else LayerSizes()
    if options.heads:
        sizes = dataclasses.replace(sizes, heads=options.heads)
    peak = _matmul_peak(device, dtype, 256 if options.tiny else 8192)
    print(f"{sizes}; a matrix product reaches {peak:.3g} TFLOP/s")
    heads = ("tokens", "kernels", "layer", "forward ms", "of peak", "GiB", "+backward ms", "of peak", "GiB")
    print(COLUMNS.format(*heads))
    for tokens in options.tokens or ((32, 64) if options.tiny else (4096, 16384, 32768)):
        for kernels in options.kernels or (("none",) if options.tiny else _usable()):
            if kernels == "none" and tokens > DENSE_LIMIT:
                continue
            for row in _measure(sizes, tokens, kernels, device, dtype, options.repeats, peak):
                print(COLUMNS.format(*row), flush=True)


def flops(sizes: LayerSizes, tokens: int, choosing: bool, backward: bool) -> float:
    """Of the matrix products of one layer over one causal sequence; the indexer, frozen, has no backward."""
    s, h = sizes, sizes.heads
    latent = s.kv_lora_rank + s.qk_rope_head_dim
    weights = s.hidden_size * (s.q_lora_rank + latent)
    weights += s.q_lora_rank * h * (s.qk_nope_head_dim + s.qk_rope_head_dim)
    weights += h * s.kv_lora_rank * (s.qk_nope_head_dim + s.v_head_dim) + h * s.v_head_dim * s.hidden_size
    pairs = sum(min(t, s.index_topk) for t in range(1, tokens + 1))
    attention = 2 * tokens * weights + 2 * pairs * h * (latent + s.kv_lora_rank)
    total = attention * (3 if backward else 1)
    if choosing:
        indexer = s.q_lora_rank * s.index_n_heads * s.index_head_dim
        indexer += s.hidden_size * (s.index_head_dim + s.index_n_heads)
        total += 2 * tokens * indexer + tokens * (tokens + 1) * s.index_n_heads * s.index_head_dim
    return total


def _measure(
    sizes: LayerSizes, tokens: int, kernels: str, device: str, dtype: Any, repeats: int, peak: float
) -> list[tuple[str, ...]]:
    import torch

    config = make_config(sizes, dtype, kernels)
    x = torch.randn(tokens, 1, sizes.hidden_size, dtype=dtype, device=device, requires_grad=True)
    rows, choice = [], None
    for name, number in (("choosing", CHOOSING), ("reusing", REUSING)):
        layer = build_attention(config, number)

        def run(layer: Any = layer, choice: Any = choice) -> Any:
            params = packed([tokens], device)
            if choice is not None:
                give_choice(params, choice)
            return layer(x, None, packed_seq_params=params)[0], params

        def forward(run: Callable[[], Any] = run) -> None:
            with torch.no_grad():
                run()

        def backward(run: Callable[[], Any] = run) -> None:
            out, _ = run()
            torch.autograd.grad(out.sum(), [x, *(p for p in layer.parameters() if p.requires_grad)])  # noqa: B023

        cells = [str(tokens), kernels, name]
        for function, both in ((forward, False), (backward, True)):
            milliseconds, extra = _cost(function, repeats, device)
            reached = flops(sizes, tokens, name == "choosing", both) / milliseconds / 1e9
            cells += [f"{milliseconds:.2f}", f"{100 * reached / peak:.1f} %", f"{extra / 2**30:.2f}"]
        rows.append(tuple(cells))
        if choice is None:
            with torch.no_grad():
                choice = choice_of(run()[1])
    return rows


def _cost(function: Callable[[], None], repeats: int, device: str) -> tuple[float, float]:
    """(median milliseconds, peak bytes beyond those held before; 0 on the CPU)."""
    import torch

    function()
    function()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times), 0.0
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), float(torch.cuda.max_memory_allocated() - held)


def _matmul_peak(device: str, dtype: Any, size: int) -> float:
    import torch

    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    milliseconds, _ = _cost(lambda: torch.mm(a, b), 5, device)
    return 2 * size**3 / milliseconds / 1e9


def _usable() -> list[str]:
    """The backends whose packages are here, and the plain path last."""
    from slime.backends.megatron_utils.dsa_kernels import missing_packages

    return [*(kernels for kernels in ("tilelang", "cudnn") if not missing_packages(kernels)), "none"]


if __name__ == "__main__":
    main()
