"""Time to schedule large rollouts. Run: python tests/benchmarks/bench_dp_schedule.py"""

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from slime.utils.dp_schedule import build_dp_schedule
from tests.helpers.shape_args import shape_args

ARGS = {
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 8192,
    "micro_batch_size": 1,
    "balance_data": False,
    "balance_by_flops": False,
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "group_query_attention": True,
    "num_query_groups": 8,
    "ffn_hidden_size": 12288,
    "swiglu": True,
    "add_bias_linear": False,
    "vocab_size": 151936,
}
LAYOUT = {"dp_size": 16, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def seconds(samples: int, steps: int, **flags: bool) -> float:
    """Best of three, lengths uniform in 10..8000."""
    rng = random.Random(0)
    lengths = [rng.randint(10, 8000) for _ in range(samples)]
    args, ids, best = shape_args(**{**ARGS, **flags}), list(range(samples)), float("inf")
    for _ in range(3):
        start = time.perf_counter()
        build_dp_schedule(args, LAYOUT, lengths, global_batch_size=samples // steps, rollout_indices=ids)
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    print(f"100,000 samples, 1 step, dynamic            {seconds(100_000, 1):.2f} s")
    print(f"100,000 samples, 10 steps, dynamic          {seconds(100_000, 10):.2f} s")
    print(f"100,000 samples, 10 steps, balance-data     {seconds(100_000, 10, balance_data=True):.2f} s")
    flops = {"balance_data": True, "balance_by_flops": True}
    print(f"  4,096 samples,  1 step,  balance-by-flops {seconds(4096, 1, **flops):.2f} s")
