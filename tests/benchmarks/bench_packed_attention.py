"""Time of packed attention for a row of many short sequences, against one SDPA call a sequence.

    python tests/benchmarks/bench_packed_attention.py [--sequences 512] [--shortest 8] [--longest 20]

Prints milliseconds, forward + backward, median of 9, one thread.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=20)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=32)
    options = parser.parse_args()

    import torch

    from slime.utils.accelerator import get_accelerator

    get_accelerator("cpu").prepare_trainer()
    from slime.backends.megatron_utils.torch_te import packed_attention

    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = torch.randint(options.shortest, options.longest + 1, (options.sequences,)).tolist()
    cu = (0, *torch.tensor(lengths).cumsum(0).tolist())
    shapes = [(heads, options.dim) for heads in (options.heads, options.kv_heads, options.kv_heads)]
    q, k, v = (torch.randn(cu[-1], 1, *shape, requires_grad=True) for shape in shapes)
    scale = options.dim**-0.5

    def naive() -> torch.Tensor:
        outs = []
        for parts in zip(*(t.squeeze(1).split(lengths) for t in (q, k, v)), strict=True):
            qs, ks, vs = (part.transpose(0, 1)[None] for part in parts)
            out = torch.nn.functional.scaled_dot_product_attention(
                qs, ks, vs, is_causal=True, scale=scale, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def packed(plan: packed_attention.Plan) -> torch.Tensor:
        return packed_attention._sdpa(plan, q, k, v, scale, 0.0)

    def new_plan() -> packed_attention.Plan:
        return packed_attention.Plan(cu, 1, 0, True, q.device)

    plan = new_plan()
    groups, _ = plan.groups()
    cells = sum(g.query_rows.numel() for g in groups)
    print(f"{options.sequences} sequences, {cu[-1]} tokens, {len(groups)} SDPA calls over {cells} rows")
    for name, function in (
        ("naive loop", naive),
        ("packed", lambda: packed(plan)),
        ("packed, plan made anew", lambda: packed(new_plan())),
    ):
        print(f"{name:24} {milliseconds(function):9.2f} ms")


def milliseconds(function) -> float:
    """Median of 9 forward + backward passes after 2 warm-up ones."""
    times = []
    for _ in range(11):
        start = time.perf_counter()
        function().sum().backward()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
