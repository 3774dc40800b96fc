"""Log-probabilities from hidden states beside the matrix products they are made of: time, ratio and peak memory.

    python tests/benchmarks/bench_log_probs.py [--tokens 4096 16384 65536] [--device cuda] [--tiny]

One table a number of tokens, in one run. "head matmul" is the output layer's product alone, in chunks of the same rows
into one buffer; "+ two backward" adds the products of its backward pass, the weight's added to a float32 gradient.
Naive is log_softmax of whole float32 logits, left out where they do not fit. Peak memory is what a pass takes beside
its inputs, the weight and the weight's gradient. Median of --repeats runs after a warm-up, on random data.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from slime.backends.megatron_utils.cp_utils import ParallelState
from slime.backends.megatron_utils.loss.vocab_parallel import _WeightGradient, vocab_parallel_log_probs
from slime.utils.log_prob_chunks import row_chunks, rows_per_chunk

ALONE = ParallelState()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--vocab", type=int, default=154_880)
    parser.add_argument("--chunk", type=int, default=-1, help="as --log-probs-chunk-size")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    options = parser.parse_args()
    if options.tiny:
        options.tokens, options.hidden, options.vocab, options.repeats = [256, 1024], 96, 4096, 3
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    torch.manual_seed(0)
    weight = (torch.randn(options.vocab, options.hidden, device=options.device) / options.hidden**0.5 * 2).to(dtype)
    weight.requires_grad_().main_grad = torch.zeros_like(weight, dtype=torch.float32)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, hidden {options.hidden}, vocabulary {options.vocab}, {dtype}")
    for tokens in options.tokens:
        measure(tokens, weight, options)


def measure(tokens: int, weight: torch.Tensor, options: argparse.Namespace) -> None:
    """One table."""
    hidden = torch.randn(tokens, weight.size(1), device=weight.device).to(weight.dtype).requires_grad_()
    rows, targets = torch.arange(tokens, device=weight.device), torch.randint(len(weight), (tokens,)).to(weight.device)
    slope = torch.randn(tokens, device=weight.device)
    most = rows_per_chunk(options.chunk, len(weight), hidden.element_size(), weight.device.type)
    parts = list(row_chunks(tokens, most))
    rows_of_first = parts[0].stop

    def log_probs(with_entropy: bool, train: bool = False) -> None:
        with torch.set_grad_enabled(train):
            values, entropy = vocab_parallel_log_probs(
                hidden,
                rows,
                targets,
                weight=weight,
                with_entropy=with_entropy,
                chunk_size=options.chunk,
                parallel=ALONE,
            )
            if train:
                (values @ slope + (entropy @ slope if with_entropy else 0)).backward()
                hidden.grad = None

    passes: dict[str, tuple[Callable[[], None], str]] = {
        "head matmul": (lambda: products(hidden, weight, parts, backward=False), "head matmul"),
        "log-probs": (lambda: log_probs(False), "head matmul"),
        "log-probs + entropy": (lambda: log_probs(True), "head matmul"),
        "naive log_softmax": (lambda: naive(hidden, weight, targets), "head matmul"),
        "head matmul + two backward": (lambda: products(hidden, weight, parts, backward=True), "+ two backward"),
        "training": (lambda: log_probs(False, train=True), "+ two backward"),
        "training + entropy": (lambda: log_probs(True, train=True), "+ two backward"),
        "naive training": (lambda: naive(hidden, weight, targets, slope), "+ two backward"),
    }
    print(f"\n{tokens} tokens, {len(parts)} chunks of {rows_of_first} rows")
    print(f"{'':28} {'ms':>10} {'TFLOP/s':>9} {'ratio':>7} {'GiB':>8}")
    base = {}
    for name, (function, reference) in passes.items():
        if name.startswith("naive") and not fits(tokens, weight):
            print(f"{name:28} {'does not fit':>10}")
            continue
        milliseconds, peak = timed(function, options.repeats, weight.device.type)
        base.setdefault(reference, milliseconds)
        ratio = milliseconds / base[reference]
        count = 3 if reference == "+ two backward" else 1
        speed = 2 * tokens * weight.numel() * count / milliseconds / 1e9
        print(f"{name:28} {milliseconds:10.2f} {speed:9.1f} {ratio:7.3f} {peak / 2**30:8.2f}", flush=True)


@torch.no_grad()
def products(hidden: torch.Tensor, weight: torch.Tensor, parts: list[slice], backward: bool) -> None:
    """The matrix products alone; in the backward ones logits stand for their gradient."""
    total = _WeightGradient(weight, placeholder=False)
    gradient = torch.empty_like(hidden) if backward else None
    buffer = hidden.new_empty(parts[0].stop, len(weight))
    for part in parts:
        inputs = hidden[part]
        logits = torch.mm(inputs, weight.t(), out=buffer[: len(inputs)])
        if backward:
            torch.mm(logits, weight, out=gradient[part])
            total.add(logits, inputs)


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, slope: torch.Tensor | None = None
) -> None:
    """log_softmax over whole float32 logits and its entropy, with autograd's own backward."""
    with torch.set_grad_enabled(slope is not None):
        log_p = (hidden @ weight.t()).float().log_softmax(-1)
        values = log_p.gather(1, targets[:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        if slope is not None:
            (values @ slope + entropy @ slope).backward()
            hidden.grad = weight.grad = None


def fits(tokens: int, weight: torch.Tensor) -> bool:
    """Whether five float32 tensors of whole logits go into the free memory."""
    free = torch.cuda.mem_get_info()[0] if weight.is_cuda else 4 << 30
    return 20 * tokens * len(weight) < free


def timed(function: Callable[[], None], repeats: int, device: str) -> tuple[float, int]:
    """(median milliseconds, peak bytes beside what was allocated before; 0 on a CPU)."""
    function()
    peak, times = 0, []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    for _ in range(repeats):
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), peak


if __name__ == "__main__":
    main()
