"""Wall time of a GRPO training step of 512 short samples on one CPU thread, whole and without the model's own work.

Run: OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_train_step [micro-batches]
"""

import logging
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.helpers import trainer as helper
from tests.helpers.tiny_models import make_tiny_model, megatron_flags

SAMPLES = 512
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}


def main(micro_batches: int) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    helper.VOCAB = SIZES["vocab_size"]
    data = helper.make_rollout(0, SAMPLES, prompt=(8, 9), response=(4, 7))
    tokens = sum(data["total_lengths"])
    with tempfile.TemporaryDirectory() as directory:
        hf = make_tiny_model("qwen3", Path(directory), **SIZES)
        values = {"global_batch_size": SAMPLES, "rollout_batch_size": 64, "n_samples_per_prompt": 8}
        capacity = -(-tokens // micro_batches) + 6
        args = helper.trainer_args("qwen3", hf, use_dynamic_batch_size=True, max_tokens_per_gpu=capacity, **values)
        args.megatron_argv = [*megatron_flags("qwen3", **SIZES), "--lr-decay-style", "constant"]

        from slime.backends.megatron_utils.actor import MegatronTrainer

        logging.disable(logging.WARNING)
        trainer = MegatronTrainer(args, init_method=f"file://{directory}/store")
        share = helper.rank_share(trainer.args, trainer.parallel_config, 0, data)
        model_time = _time_the_model()
        for step in range(5):
            model_time.clear()
            start = time.perf_counter()
            trainer.train(step, share)
            total = time.perf_counter() - start
            inside = sum(model_time.values())
            print(
                f"{tokens} tokens in {share['num_microbatches'][0]} micro-batches: {total * 1e3:.0f} ms, outside "
                f"forward, loss, backward and optimizer {(total - inside) * 1e3:.0f} ms ({1 - inside / total:.1%})"
            )
        trainer.close()


def _time_the_model() -> dict[str, float]:
    """Add up the time in the model's forward, the loss, the backward pass and the optimizer."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import schedules

    from slime.backends.megatron_utils import model

    seconds: dict[str, float] = defaultdict(float)

    def timed(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - start

        setattr(owner, name, wrapper)

    for owner, name in ((model, "_forward"), (model, "loss_function"), (schedules, "backward_step")):
        timed(owner, name)
    timed(ChainedOptimizer, "step")
    return seconds


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
