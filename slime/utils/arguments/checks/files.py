"""Rules of paths: what must exist is there, and outputs do not overwrite each other."""

import importlib.util
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime.utils.arguments.flag import Problem
from slime.utils.arguments.groups import GROUPS
from slime.utils.arguments.hf_config import is_hf_checkpoint, is_megatron_checkpoint

_SLICE = re.compile(r"@\[[^\]]*\]$")
_PLUG_INS = {flag.dest for group in GROUPS for flag in group.flags if flag.dest.endswith("_path")}
_PLUG_INS -= {"custom_config_path", "megatron_config_path"}


def check_hf_checkpoint(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Tokenizer, engine weights and model facts come from a local Hugging Face directory."""
    if a.hf_checkpoint is None:
        yield Problem(("--hf-checkpoint",), "is not given; tokenizer, engines and model facts come from it")
    elif not Path(a.hf_checkpoint).is_dir():
        yield Problem(("--hf-checkpoint",), f"{a.hf_checkpoint} is not a directory")
    elif not is_hf_checkpoint(a.hf_checkpoint):
        yield Problem(("--hf-checkpoint",), f"{a.hf_checkpoint} holds no config.json")


def check_prompt_data(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The built-in data sources read a file."""
    if a.num_rollout == 0 or a.load_debug_rollout_data is not None or not a.rollout_global_dataset:
        return
    if a.prompt_data is None:
        if "data_source_path" not in given:
            yield Problem(
                ("--prompt-data",),
                "is not given; without it there is nothing to train on",
                "--prompt-data train.jsonl",
            )
    elif not _exists(a.prompt_data):
        yield Problem(("--prompt-data",), f"{_file(a.prompt_data)} does not exist")


def check_eval_data(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """An evaluation has data, and its files exist."""
    if (
        a.eval_interval is not None
        and not a.eval_datasets
        and not ("eval_config" in given or "eval_prompt_data" in given)
    ):
        says = f"{a.eval_interval} asks for evaluations, and no evaluation data is given"
        yield Problem(("--eval-interval",), says, "--eval-prompt-data heldout heldout.jsonl")
    flag = "--eval-config" if a.eval_config else "--eval-prompt-data"
    for dataset in a.eval_datasets:
        if not _exists(dataset.path):
            yield Problem((flag,), f"{dataset.name}: {_file(dataset.path)} does not exist")


def check_reference(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A KL term needs the weights of the reference model."""
    if not (a.kl_coef != 0 or a.use_kl_loss) or a.debug_rollout_only:
        return
    cause = "--use-kl-loss" if a.use_kl_loss else f"--kl-coef {a.kl_coef:g}"
    if a.ref_load is None:
        suggestion = f"--ref-load {a.hf_checkpoint}" if a.hf_checkpoint else "--ref-load CHECKPOINT"
        yield Problem(("--ref-load",), f"is not given, and {cause} compares with a reference model", suggestion)
    elif not (is_megatron_checkpoint(a.ref_load) or is_hf_checkpoint(a.ref_load)):
        kinds = (
            "neither a Megatron checkpoint (latest_checkpointed_iteration.txt) nor a Hugging Face one (config.json)"
        )
        says = f"{a.ref_load} is {kinds}"
        yield Problem(("--ref-load",), says)


def check_saving(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Checkpoints have a place, and a path that names one rollout can name them all."""
    if a.save_interval is not None and a.save is None:
        yield Problem(
            ("--save-interval",),
            f"{a.save_interval} asks for checkpoints, and --save is not given",
            "--save checkpoints",
        )
    for name in ("save_debug_rollout_data", "save_debug_train_data", "save_hf"):
        template, flag = getattr(a, name), given.get(name, "--" + name.replace("_", "-"))
        if template is None:
            continue
        try:
            template.format(rollout_id=0, rank=0)
        except (KeyError, IndexError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            says = f"{template} is no template ({reason}); known fields: {{rollout_id}} and {{rank}}"
            yield Problem((flag,), says)
    if a.save_debug_rollout_data is not None and a.save_debug_rollout_data == a.save_debug_train_data:
        says = f"both are {a.save_debug_rollout_data}; one would overwrite the other"
        yield Problem(("--save-debug-rollout-data", "--save-debug-train-data"), says)


def check_debug_data(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Saved rollouts exist; a sub-sample is a fraction."""
    fraction = a.load_debug_rollout_data_subsample
    if fraction is not None and not 0 < fraction <= 1:
        yield Problem(("--load-debug-rollout-data-subsample",), f"is {fraction:g}, must be within (0, 1]")
    path = a.load_debug_rollout_data
    if path is not None and "{" not in path and not Path(path).is_file():
        yield Problem(("--load-debug-rollout-data",), f"{path} does not exist")


def check_plug_ins(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The modules of plug-ins exist. They are not imported here; of a dotted path its parent packages are."""
    for dest, flag in given.items():
        path = getattr(a, dest, None)
        if dest not in _PLUG_INS or path is None:
            continue
        if ".py:" in path:
            file = Path(path.rpartition(":")[0]).expanduser()
            if not file.is_file():
                yield Problem((flag,), f"{path}: {file} does not exist")
            continue
        module = path.rpartition(".")[0]
        try:
            found = bool(module) and importlib.util.find_spec(module) is not None
        except ImportError as error:
            yield Problem((flag,), f"{path}: {error}")
            continue
        if not found:
            says = f"{path}: there is no module {module!r}" if module else f"{path} names no module"
            yield Problem((flag,), says, f"{flag} package.module.name")


def _file(path: str) -> str:
    return _SLICE.sub("", path)


def _exists(path: str) -> bool:
    return Path(_file(path)).exists()


CHECKS = (
    check_hf_checkpoint,
    check_prompt_data,
    check_eval_data,
    check_reference,
    check_saving,
    check_debug_data,
    check_plug_ins,
)
