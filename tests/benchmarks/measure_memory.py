"""Bytes the trainer really takes on one device beside the plan's estimate: weights, gradients, optimizer, activations.

Run: python -m tests.benchmarks.measure_memory [--device cpu --tiny] [--models dense moe mla] [--json FILE]
One process, one rank, random weights; every case builds slime's model, DDP buffers and optimizer, trains two steps of
one micro-batch through slime's loss and prints one JSON object a line, then a table of the ratios.
"""

import argparse
import gc
import json
import logging
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import trainer as helper

COMMON = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope".split()
UNTIED = ["--untie-embeddings-and-output-weights"]
EXPERTS = (
    "--num-experts 8 --moe-grouped-gemm --moe-router-topk 2 --moe-router-dtype fp32 --moe-aux-loss-coeff 0 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
).split()
MODELS: dict[str, tuple[dict[str, int], list[str]]] = {
    "dense": (
        {
            "num-layers": 8,
            "hidden-size": 2048,
            "ffn-hidden-size": 6144,
            "num-attention-heads": 16,
            "num-query-groups": 8,
            "kv-channels": 128,
            "vocab-size": 151936,
        },
        ["--group-query-attention", "--qk-layernorm"],
    ),
    "moe": (
        {
            "num-layers": 4,
            "hidden-size": 2048,
            "ffn-hidden-size": 6144,
            "num-attention-heads": 32,
            "num-query-groups": 4,
            "kv-channels": 128,
            "vocab-size": 65536,
            "moe-ffn-hidden-size": 1536,
            "moe-shared-expert-intermediate-size": 1024,
        },
        ["--group-query-attention", "--qk-layernorm", *UNTIED, *EXPERTS],
    ),
    "mla": (
        {
            "num-layers": 6,
            "hidden-size": 2048,
            "ffn-hidden-size": 8192,
            "num-attention-heads": 16,
            "kv-channels": 128,
            "q-lora-rank": 768,
            "kv-lora-rank": 512,
            "qk-head-dim": 128,
            "qk-pos-emb-head-dim": 64,
            "v-head-dim": 128,
            "vocab-size": 65536,
        },
        ["--multi-latent-attention", "--qk-layernorm", *UNTIED],
    ),
}
TINY = {
    "num-layers": 2,
    "hidden-size": 96,
    "ffn-hidden-size": 224,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "kv-channels": 32,
    "vocab-size": 1000,
    "moe-ffn-hidden-size": 112,
    "moe-shared-expert-intermediate-size": 80,
    "q-lora-rank": 56,
    "kv-lora-rank": 40,
    "qk-head-dim": 24,
    "qk-pos-emb-head-dim": 16,
    "v-head-dim": 24,
}
RECOMPUTE = {
    "none": [],
    "selective": ["--recompute-granularity", "selective"],
    "full": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
}
TOKENS = (4096, 16384)
TINY_TOKENS = (256, 512)
NOT_THE_TRAINERS = {"update_weight_buffer_size": 2**29, "update_weight_transport": "nccl"}
SAMPLE = 1024  # tokens of each packed sample; a quarter of them is the prompt


def model_flags(name: str, tiny: bool) -> list[str]:
    """Megatron's flags for one of MODELS, with TINY's sizes if asked."""
    sizes, switches = MODELS[name]
    if tiny:
        sizes = {key: TINY[key] for key in sizes}
    return [*COMMON, *switches, *(token for key, value in sizes.items() for token in (f"--{key}", str(value)))]


def driver_args(flags: list[str], device: str, bf16: bool) -> Namespace:
    """The driver's namespace of a run that trains one step of one micro-batch a rollout."""
    values = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "global_batch_size": 1, "entropy_coef": 0.0}
    args = helper.trainer_args("qwen3", "", accelerator=device, bf16=bf16, **values)
    args.hf_checkpoint = None
    schedule = ["--lr-decay-style", "constant", "--tokenizer-type", "NullTokenizer", "--tokenizer-model", "none"]
    args.megatron_argv = [*flags, *schedule, *(["--bf16"] if bf16 else [])]
    return args


def start(args: Namespace, store: Path | None, rank: int = 0, world_size: int = 1) -> Namespace:
    """Megatron in this process; the trainer's namespace. store: where the default group meets, if there is none."""
    from slime.utils.accelerator import get_accelerator

    accelerator = get_accelerator(args.accelerator)
    accelerator.prepare_trainer()
    accelerator.set_device(0)
    from slime.backends.megatron_utils import initialize, packed_rope, torch_te
    from slime.backends.megatron_utils.arguments import build_megatron_args

    torch_te.install()
    packed_rope.install()
    trainer = build_megatron_args(args, rank, world_size)
    initialize.initialize_distributed(trainer, accelerator.distributed_backend, f"file://{store}")
    initialize.initialize_megatron(trainer)
    return trainer


def stop() -> None:
    """Undo `start`; the process group stays for the next case."""
    from slime.backends.megatron_utils.initialize import shutdown_megatron

    shutdown_megatron()


def micro_batch(args: Namespace, tokens: int, device: Any) -> dict[str, Any]:
    """Rollout data of one micro-batch in equal samples, `tokens` tokens on each context-parallel rank."""
    import torch

    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    tokens *= args.context_parallel_size
    length = min(SAMPLE, tokens // 2)
    count, prompt = tokens // length, length // 4
    response = length - prompt
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, args.vocab_size, (count, length), generator=generator).to(device)
    ones = torch.ones(response, device=device)
    mine = slice_log_prob_with_cp(ones, length, response)
    return {
        "tokens": list(ids),
        "total_lengths": [length] * count,
        "response_lengths": [response] * count,
        "loss_masks": [ones.int()] * count,
        "rollout_mask_sums": torch.full((count,), float(response), device=device),
        "sample_indices": list(range(count)),
        "advantages": [mine] * count,
        "rollout_log_probs": [-mine] * count,
        "micro_batch_indices": [list(range(count))],
    }


class Meter:
    """Allocated bytes now and at the peak since the last reset; zeros on the CPU, which does not count."""

    def __init__(self, device: str):
        import torch

        self._cuda = torch.cuda if device == "cuda" else None

    def now(self) -> int:
        return self._cuda.memory_allocated() if self._cuda else 0

    def peak(self) -> int:
        return self._cuda.max_memory_allocated() if self._cuda else 0

    def reset(self) -> None:
        gc.collect()
        if self._cuda:
            self._cuda.synchronize()
            self._cuda.empty_cache()
            self._cuda.reset_peak_memory_stats()

    def reserved(self) -> int:
        return self._cuda.max_memory_reserved() if self._cuda else 0

    def outside(self) -> int:
        """Device memory that torch's allocator does not know: the CUDA context, kernels, library workspaces."""
        if self._cuda is None:
            return 0
        free, total = self._cuda.mem_get_info()
        return total - free - self._cuda.memory_reserved()


@contextmanager
def kept_for_backward(state: Any) -> Iterator[dict[Any, Any]]:
    """Storages that autograd keeps, parameters apart, by address. Stops noting when `stop` is in the result.

    Only on the CPU: it holds the storages (so that no address comes twice), which a peak must not contain.
    """
    import torch

    if torch.cuda.is_available():
        yield {}
        return
    parameters = {p.untyped_storage().data_ptr() for chunk in state.model for p in chunk.parameters()}
    kept: dict[Any, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if "stop" not in kept and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def buffer_bytes(state: Any) -> dict[str, int]:
    """Bytes of DDP's contiguous buffers: weights, gradients."""
    found = {"weights": 0, "gradients": 0}
    for chunk in state.model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            found["gradients"] += buffer.grad_data.nbytes
            found["weights"] += buffer.param_data.nbytes if buffer.param_data is not None else 0
    if not found["weights"]:
        found["weights"] = sum(p.nbytes for chunk in state.model for p in chunk.parameters())
    return found


def optimizer_bytes(optimizer: Any) -> int:
    """Bytes of master weights and Adam's moments, each storage once."""
    import torch

    seen: dict[int, int] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        model_params = {p.untyped_storage().data_ptr() for group in _model_groups(part) for p in group}
        for state in part.optimizer.state.values():
            tensors = [t for t in state.values() if isinstance(t, torch.Tensor)]
            seen |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                if p.untyped_storage().data_ptr() not in model_params:
                    seen[p.untyped_storage().data_ptr()] = p.untyped_storage().nbytes()
    return sum(seen.values())


def _model_groups(part: Any) -> Iterator[list[Any]]:
    for name in ("model_float16_groups", "model_fp32_groups", "shard_fp32_groups"):
        yield from getattr(part, name, [])


@contextmanager
def watched_loss(meter: Meter, kept: dict[Any, Any]) -> Iterator[dict[str, int]]:
    """Notes what is allocated when the loss begins, and the bytes of logits among it (0 where losses make them)."""
    import torch

    from slime.backends.megatron_utils import model

    original, seen = model.loss_function, {"at_loss": 0, "logits": 0}

    def loss_function(*args: Any) -> Any:
        scores = args[-1]
        seen["at_loss"] = meter.now()
        if isinstance(scores, torch.Tensor):
            seen["logits"] = scores.nbytes
        elif not scores.hidden.is_cuda:  # the head's input, which the loss is about to keep for backward
            storage = scores.hidden.untyped_storage()
            kept[storage.data_ptr()] = storage
        kept.setdefault("stop", None)
        return original(*args)

    model.loss_function = loss_function
    try:
        yield seen
    finally:
        model.loss_function = original


def measure(args: Namespace, tokens: int, device: str) -> dict[str, int]:
    """Build, train twice, count. Bytes: weights, gradients, optimizer, activations, logits, peak of a step, ..."""
    import torch

    from slime.backends.megatron_utils.data import DataIterator
    from slime.backends.megatron_utils.model import setup_model_and_optimizer, train_one_step

    meter = Meter(device)
    meter.reset()
    empty = meter.now()
    state = setup_model_and_optimizer(args)
    data = micro_batch(args, tokens, torch.device(device))

    def step(number: int) -> None:
        iterators = [DataIterator(data, data["micro_batch_indices"])]
        train_one_step(args, state, iterators, 1, 1, number, 0)

    step(0)  # allocates the optimizer's states, compiles fused kernels
    meter.reset()
    found = buffer_bytes(state) | {"optimizer": optimizer_bytes(state.optimizer)}
    resident = sum(found.values())  # more may be allocated: a module may hold on to its last micro-batch
    found["held_between_steps"] = max(meter.now() - empty - resident, 0)
    peaks: dict[str, int] = {}
    optimizer_step = state.optimizer.step

    def noted_step() -> Any:
        peaks["forward_backward"], peaks["reserved"] = meter.peak() - empty, meter.reserved()
        meter.reset()
        done = optimizer_step()
        peaks["optimizer_step"] = meter.peak() - empty
        return done

    state.optimizer.step = noted_step
    with kept_for_backward(state) as kept, watched_loss(meter, kept) as seen:
        step(1)
    kept.pop("stop")
    at_loss = seen["at_loss"] - empty - resident - seen["logits"]
    on_cpu = sum(storage.nbytes() for storage in kept.values())
    found["activations"] = at_loss if device == "cuda" else on_cpu
    found["logits"] = seen["logits"]
    found["step"] = max(peaks["forward_backward"] - resident, 0)  # activations and whatever the step needs beside them
    found["optimizer_step"] = max(peaks["optimizer_step"] - resident, 0)
    found["reserved"], found["outside"] = peaks["reserved"], meter.outside()
    return found


def estimate(args: Namespace, tokens: int) -> dict[str, int]:
    """The plan's numbers under the names of `measure`."""
    from slime.plan.memory import trainer_memory

    whole = Namespace(**vars(args), **NOT_THE_TRAINERS)
    (memory,) = trainer_memory(whole, tokens=tokens, response_tokens=tokens * 3 // 4)
    return {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations.retained,
        "step": memory.activations.peak,
        "optimizer_step": memory.optimizer_step,
    }


def pinned_block(size: int = 9 * 2**23) -> dict[str, int]:
    """What a pinned tensor of `size` bytes takes on the host (a size just above a power of two)."""
    import torch

    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    return {"pinned_bytes": tensor.nbytes, "host_bytes": taken}


def run(
    models: list[str], recomputations: list[str], device: str, tiny: bool, tokens: tuple[int, ...], vocab: int | None
) -> list[dict[str, Any]]:
    """One record a case; the process group is made once."""
    import torch

    records = []
    with tempfile.TemporaryDirectory() as directory:
        for name in models:
            for recompute in recomputations:
                flags = [*RECOMPUTE[recompute], *(["--vocab-size", str(vocab)] if vocab else [])]
                for count in tokens:
                    base = driver_args([*model_flags(name, tiny), *flags], device, bf16=device == "cuda")
                    args = start(base, Path(directory) / "store")
                    case = {"model": name, "recompute": recompute, "tokens": count}
                    case |= {"measured": measure(args, count, device), "estimate": estimate(args, count)}
                    stop()
                    records.append(case)
                    print(json.dumps(case), flush=True)
    if device == "cuda":
        print(json.dumps(pinned_block()), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return records


def table(records: list[dict[str, Any]]) -> str:
    """estimate / measured of every case, in per cent; "-" where this device does not count."""
    columns = ("weights", "gradients", "optimizer", "activations", "step", "optimizer_step")
    lines = [f"{'case':28}" + "".join(f"{c:>15}" for c in columns)]
    for r in records:
        ratios = [f"{100 * r['estimate'][c] / r['measured'][c]:.0f} %" if r["measured"][c] else "-" for c in columns]
        lines.append(
            f"{r['model']} {r['recompute']} {r['tokens']:<10}".ljust(28) + "".join(f"{x:>15}" for x in ratios)
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a smoke test on a CPU")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, help="tokens of the micro-batch")
    parser.add_argument("--recompute", nargs="+", choices=tuple(RECOMPUTE), default=list(RECOMPUTE))
    parser.add_argument("--vocab-size", type=int, help="a small one, so that backward and not the loss is the peak")
    parser.add_argument("--json", type=Path, help="also write all records to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    tokens = tuple(options.tokens or (TINY_TOKENS if options.tiny else TOKENS))
    records = run(options.models, options.recompute, options.device, options.tiny, tokens, options.vocab_size)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    sys.stdout.write(table(records) + "\n")


if __name__ == "__main__":
    main()
