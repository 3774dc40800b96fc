"""Rules of the optimizer: where its states live and in which format, and the schedules of its numbers."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.checks.common import of_trainer
from slime.utils.arguments.flag import Problem

STATE_FORMATS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
OPTIMIZERS = ("adam", "sgd")


@of_trainer
def check_optimizer(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Adam and SGD are what slime's distributed optimizer shards."""
    if a.optimizer not in OPTIMIZERS:
        says = f"{a.optimizer} does not work on the distributed optimizer, which slime always uses"
        yield Problem(("--optimizer",), says, "--optimizer adam", kind="unsupported")
    if a.use_stateless_adam and a.optimizer != "adam":
        yield Problem(("--use-stateless-adam", "--optimizer"), f"{a.optimizer} is not adam", "--optimizer adam")
    if a.use_stateless_adam and not a.no_save_optim:
        says = "leaves no optimizer states to save; say so"
        yield Problem(("--use-stateless-adam",), says, "--no-save-optim")
    if a.use_stateless_adam and a.optimizer_cpu_offload:
        says = "there are no states to keep on the CPU; leave one of the two out"
        yield Problem(("--use-stateless-adam", "--optimizer-cpu-offload"), says)


@of_trainer
def check_optimizer_offload(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Optimizer states on the CPU take the code path of the precision-aware optimizer; the rest tunes that."""
    offload = "--optimizer-cpu-offload"
    if a.optimizer_cpu_offload and not a.use_precision_aware_optimizer:
        says = "works only together with the precision-aware optimizer, whose code it shares"
        yield Problem((offload,), says, "--use-precision-aware-optimizer")
    if not 0 <= a.optimizer_offload_fraction <= 1:
        says = f"is {a.optimizer_offload_fraction:g}, must be within [0, 1]"
        yield Problem(("--optimizer-offload-fraction",), says, "--optimizer-offload-fraction 1.0")
    if a.optimizer_cpu_offload:
        return
    for dest, what in (
        ("overlap_cpu_optimizer_d2h_h2d", "overlaps copies between CPU and GPU"),
        ("use_torch_optimizer_for_cpu_offload", "chooses the optimizer of the CPU"),
    ):
        if dest in given and getattr(a, dest):
            aware = "" if a.use_precision_aware_optimizer else " --use-precision-aware-optimizer"
            yield Problem((given[dest],), f"{what}, and the optimizer is not on the CPU", offload + aware)


@of_trainer
def check_optimizer_formats(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """States in other formats than 32 bits are the precision-aware optimizer's."""
    aware = "--use-precision-aware-optimizer"
    if a.use_precision_aware_optimizer:
        if a.optimizer != "adam":
            yield Problem((aware, "--optimizer"), f"{a.optimizer} is not adam", "--optimizer adam")
        if a.accelerator == "cpu" and not a.optimizer_cpu_offload:
            says = "needs Transformer Engine's Adam, and this run is on a CPU (--accelerator cpu); leave it out"
            yield Problem((aware,), says)
    else:
        for dest in STATE_FORMATS:
            if getattr(a, dest) not in ("fp32", None):
                flag = given.get(dest, "--" + dest.replace("_", "-"))
                yield Problem((flag,), f"{getattr(a, dest)} needs the precision-aware optimizer", aware)
    if a.main_grads_dtype == "bf16" and a.accumulate_allreduce_grads_in_fp32 and a.bf16:
        flags = ("--main-grads-dtype", "--accumulate-allreduce-grads-in-fp32")
        yield Problem(flags, "the one keeps gradients in 16 bits, the other in 32", "--main-grads-dtype fp32")
    if a.main_params_dtype == "fp16" and not a.fp16 and a.use_precision_aware_optimizer:
        says = "fp16 master weights beside bf16 ones lose their small values"
        yield Problem(("--main-params-dtype",), says, "--main-params-dtype fp32")


@of_trainer
def check_learning_rate(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The learning rate goes from its warm-up to its end within the run; lengths are counted in iterations."""
    if a.lr is not None and a.lr < 0:
        yield Problem(("--lr",), f"is {a.lr:g}, must be >= 0", "--lr 1e-6")
    if a.lr is not None and a.min_lr > a.lr >= 0:
        yield Problem(("--min-lr",), f"{a.min_lr:g} is above --lr {a.lr:g}", f"--min-lr {a.lr:g}")
    if a.lr is not None and a.lr_warmup_init > a.lr >= 0:
        yield Problem(
            ("--lr-warmup-init",), f"{a.lr_warmup_init:g} is above --lr {a.lr:g}", f"--lr-warmup-init {a.lr:g}"
        )
    for dest in ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"):
        if dest in given and getattr(a, dest):
            legal = "--num-rollout 100" if dest == "train_samples" else f"--{dest[:-7].replace('_', '-')}iters 10"
            says = "counts samples, and slime's runs count rollouts and iterations"
            yield Problem((given[dest],), says, f"leave it out and give {legal}")
    if a.lr_warmup_fraction is not None and a.lr_warmup_iters:
        yield Problem(("--lr-warmup-fraction", "--lr-warmup-iters"), "give one of the two", "--lr-warmup-iters 0")
    if a.lr_warmup_fraction is not None and not 0 <= a.lr_warmup_fraction < 1:
        says = f"is {a.lr_warmup_fraction:g}, must be within [0, 1)"
        yield Problem(("--lr-warmup-fraction",), says, "--lr-warmup-fraction 0.1")
    if a.lr_decay_style == "WSD" and a.lr_wsd_decay_iters is None:
        says = "WSD decays over the last iterations, whose number is not given"
        yield Problem(("--lr-wsd-decay-iters",), says, "--lr-wsd-decay-iters 10")
    yield from _check_warmup(a)


def _check_warmup(a: Namespace) -> Iterator[Problem]:
    """Megatron's schedule asks that the warm-up ends before the decay does."""
    iterations, made = _iterations(a)
    if a.lr_warmup_fraction is None and a.lr_warmup_iters and iterations and a.lr_warmup_iters >= iterations:
        says = f"{a.lr_warmup_iters} is not less than the {iterations} iterations of {made}"
        yield Problem(("--lr-warmup-iters",), says, f"--lr-warmup-iters {iterations - 1}")


def _iterations(a: Namespace) -> tuple[int | None, str]:
    """Iterations over which the learning rate changes, and where the number comes from."""
    if a.lr_decay_iters:
        return a.lr_decay_iters, "--lr-decay-iters"
    if not (a.num_rollout and a.rollout_batch_size and a.global_batch_size):
        return None, ""
    samples = a.num_rollout * a.rollout_batch_size * a.n_samples_per_prompt
    made = f"the run ({a.num_rollout} rollouts x {a.rollout_batch_size} x {a.n_samples_per_prompt} samples"
    return samples // a.global_batch_size, f"{made} // --global-batch-size {a.global_batch_size})"


@of_trainer
def check_weight_decay(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A weight decay that changes has a start and an end; a constant one has neither."""
    style, ends = a.weight_decay_incr_style, ("--start-weight-decay", "--end-weight-decay")
    if style == "constant":
        for flag, value in zip(ends, (a.start_weight_decay, a.end_weight_decay), strict=True):
            if value is not None:
                says = f"{value:g} with --weight-decay-incr-style constant, which is --weight-decay all along"
                yield Problem((flag,), says, f"--weight-decay-incr-style linear {ends[0]} 0 {ends[1]} 0.1")
    elif a.start_weight_decay is None or a.end_weight_decay is None:
        says = f"{style} goes from {ends[0]} to {ends[1]}; give both"
        yield Problem(("--weight-decay-incr-style",), says, f"{ends[0]} 0 {ends[1]} 0.1")
    if a.clip_grad < 0:
        yield Problem(("--clip-grad",), f"is {a.clip_grad:g}, must be >= 0 (0 is off)", "--clip-grad 1.0")


CHECKS = (
    check_optimizer,
    check_optimizer_offload,
    check_optimizer_formats,
    check_learning_rate,
    check_weight_decay,
)
