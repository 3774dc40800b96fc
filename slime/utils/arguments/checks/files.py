"""Rules of inputs: what the run reads is there, and is what it should be. Absence is a matter of this machine."""

import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.utils.arguments.checks.common import model_config
from slime.utils.arguments.flag import Problem
from slime.utils.arguments.hf_config import (
    TRACKER,
    is_hf_checkpoint,
    is_megatron_checkpoint,
    is_unlisted_megatron_checkpoint,
    language_model,
)

_SLICE = re.compile(r"@\[([^\]]*)\]$")
_BOUNDS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_SUFFIXES = (".jsonl", ".parquet")
# Facts by which a checkpoint to load shows that it belongs to another model.
FAMILY = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_routed_experts")


def check_hf_checkpoint(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Tokenizer, engine weights and model facts come from a local Hugging Face directory."""
    if a.hf_checkpoint is None:
        yield Problem(("--hf-checkpoint",), "is not given; tokenizer, engines and model facts come from it")
    elif not os.path.isdir(a.hf_checkpoint):
        yield Problem(("--hf-checkpoint",), f"{a.hf_checkpoint} is not a directory", kind="absent")
    elif not is_hf_checkpoint(a.hf_checkpoint):
        yield Problem(("--hf-checkpoint",), f"{a.hf_checkpoint} holds no config.json", kind="absent")


def check_prompt_data(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The built-in data sources read a file."""
    if a.num_rollout == 0 or a.load_debug_rollout_data is not None or not a.rollout_global_dataset:
        return
    if a.prompt_data is None:
        if "data_source_path" not in given:
            says = "is not given; without it there is nothing to train on"
            yield Problem(("--prompt-data",), says, "--prompt-data train.jsonl")
    elif "data_source_path" not in given:
        yield from _check_data_file("--prompt-data", "", a.prompt_data)


def check_eval_data(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """An evaluation has data, and its files exist."""
    asked = "eval_config" in given or "eval_prompt_data" in given
    if a.eval_interval is not None and not a.eval_datasets and not asked:
        says = f"{a.eval_interval} asks for evaluations, and no evaluation data is given"
        yield Problem(("--eval-interval",), says, "--eval-prompt-data heldout heldout.jsonl")
    if "eval_function_path" in given or "rollout_function_path" in given:
        return  # a function of the user's reads what it likes
    flag = "--eval-config" if a.eval_config else "--eval-prompt-data"
    for dataset in a.eval_datasets:
        yield from _check_data_file(flag, f"{dataset.name}: ", dataset.path)


def _check_data_file(flag: str, where: str, path: str) -> Iterator[Problem]:
    file = _SLICE.sub("", path)
    span = _SLICE.search(path)
    if span and not _BOUNDS.fullmatch(span[1]):
        says = f"{where}{path}: [{span[1]}] is no slice of rows"
        yield Problem((flag,), says, f"{flag} {file}@[0:100]" if not where else "")
    if Path(file).suffix not in _SUFFIXES:
        yield Problem((flag,), f"{where}{file} must be a {' or '.join(_SUFFIXES)} file")
    elif not os.path.exists(file):
        yield Problem((flag,), f"{where}{file} does not exist", kind="absent")


def check_reference(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A KL term needs the weights of the reference model."""
    if not (a.kl_coef != 0 or a.use_kl_loss) or a.debug_rollout_only:
        return
    cause = "--use-kl-loss" if a.use_kl_loss else f"--kl-coef {a.kl_coef:g}"
    if a.ref_load is None:
        suggestion = f"--ref-load {a.hf_checkpoint}" if a.hf_checkpoint else "--ref-load CHECKPOINT"
        yield Problem(("--ref-load",), f"is not given, and {cause} compares with a reference model", suggestion)
    elif is_unlisted_megatron_checkpoint(a.ref_load):
        return  # reported as such
    elif not (is_megatron_checkpoint(a.ref_load) or is_hf_checkpoint(a.ref_load)):
        kinds = f"neither a Megatron checkpoint ({TRACKER}) nor a Hugging Face one (config.json)"
        yield Problem(("--ref-load",), f"{a.ref_load} is {kinds}", kind="absent")


def check_checkpoint_directories(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Weights that lie there are loaded: a run must not start elsewhere because the directory above was meant."""
    if a.debug_rollout_only:
        return
    for path, flag in {a.load: "--load", a.ref_load: "--ref-load"}.items():  # --load falls back to --ref-load
        if not is_unlisted_megatron_checkpoint(path):
            continue
        parent = Path(path).absolute().parent
        newest = (parent / TRACKER).read_text().strip() if (parent / TRACKER).is_file() else None
        says = f"{path} is a checkpoint inside a directory, and Megatron loads the one that {parent / TRACKER} names: "
        yield Problem((flag,), says + (newest or "there is none"), f"{flag} {parent}" if newest else "")


def check_checkpoint_steps(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """An iteration that is asked for is there."""
    if a.debug_rollout_only:
        return
    for flag, step, directory in (
        ("--ref-ckpt-step", a.ref_ckpt_step, a.ref_load),
        ("--ckpt-step", a.ckpt_step if "ckpt_step" in given else None, a.load),
    ):
        if step is None or not is_megatron_checkpoint(directory):
            continue
        if not (Path(directory) / f"iter_{step:07d}").is_dir():
            there = sorted(int(path.name[5:]) for path in Path(directory).glob("iter_*") if path.name[5:].isdecimal())
            says = f"{step} is not in {directory}" + (f", which has {', '.join(map(str, there))}" if there else "")
            yield Problem((flag,), says, f"{flag} {there[-1]}" if there else "", kind="absent")


def check_same_model(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A Hugging Face checkpoint to start or compare from is of the model that the engines serve."""
    config = model_config(a)
    if a.debug_rollout_only or not config:
        return
    for flag, path in (("--load", a.load), ("--ref-load", a.ref_load)):
        if path is None or not is_hf_checkpoint(path) or is_megatron_checkpoint(path):
            continue
        theirs = _config_of(path)
        for key in FAMILY:
            fact, other = config.get(key), theirs.get(key)
            if fact is not None and other is not None and fact != other:
                says = f"{path} is another model: its {key} is {other}, that of --hf-checkpoint is {fact}"
                yield Problem((flag,), says, f"{flag} {a.hf_checkpoint}")
                break


def _config_of(path: str) -> dict[str, Any]:
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return {}  # the loader will say so; this check has nothing to compare
    return language_model(config) if isinstance(config, dict) else {}


def check_debug_data(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Saved rollouts exist; a sub-sample is a fraction."""
    fraction = a.load_debug_rollout_data_subsample
    if fraction is not None and not 0 < fraction <= 1:
        says = f"is {fraction:g}, must be within (0, 1]"
        yield Problem(("--load-debug-rollout-data-subsample",), says, "--load-debug-rollout-data-subsample 0.5")
    path = a.load_debug_rollout_data
    if path is not None and "{" not in path and not os.path.isfile(path):
        yield Problem(("--load-debug-rollout-data",), f"{path} does not exist", kind="absent")


CHECKS = (
    check_hf_checkpoint,
    check_prompt_data,
    check_eval_data,
    check_reference,
    check_checkpoint_directories,
    check_checkpoint_steps,
    check_same_model,
    check_debug_data,
)
