"""Rules of outputs: there is a place for them, it can be written, and one file does not overwrite another."""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime.utils.arguments.flag import Problem
from slime.utils.arguments.hf_config import is_hf_checkpoint, is_megatron_checkpoint

# dest -> fields that its template may hold, and those without which its files overwrite one another.
TEMPLATES = {
    "save_debug_rollout_data": (("rollout_id",), ("rollout_id",)),
    "save_debug_train_data": (("rollout_id", "rank"), ("rollout_id",)),
    "save_hf": (("rollout_id",), ()),
    "load_debug_rollout_data": (("rollout_id",), ()),
}
DIRECTORIES = ("save", "update_weight_disk_dir", "wandb_dir", "dump_details")
FILES = ("metrics_jsonl", "save_debug_rollout_data", "save_debug_train_data", "save_hf")


def check_saving(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Checkpoints have a place of their own, and an interval a sense."""
    if a.save_interval is not None and a.save is None:
        says = f"{a.save_interval} asks for checkpoints, and --save is not given"
        yield Problem(("--save-interval",), says, "--save checkpoints")
    if a.save is None:
        return
    if is_hf_checkpoint(a.save) and not is_megatron_checkpoint(a.save):
        says = f"{a.save} is a Hugging Face checkpoint; Megatron's would be mixed into it"
        yield Problem(("--save",), says, f"--save {a.save.rstrip('/')}_slime")
    if a.ref_load is not None and _same(a.save, a.ref_load) and not a.debug_rollout_only:
        says = f"both are {a.save}: the reference would become one of this run's checkpoints"
        yield Problem(("--save", "--ref-load"), says, f"--save {a.save.rstrip('/')}_slime")
    retain = a.save_retain_interval
    if retain is not None and a.save_interval and (retain < 1 or retain % a.save_interval):
        says = f"{retain} is not a multiple of --save-interval {a.save_interval}"
        yield Problem(("--save-retain-interval",), says, f"--save-retain-interval {a.save_interval}")


def check_templates(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """A path that names one rollout can name them all."""
    for dest, (fields, needed) in TEMPLATES.items():
        template, flag = getattr(a, dest), given.get(dest, "--" + dest.replace("_", "-"))
        if template is None:
            continue
        try:
            template.format(**dict.fromkeys(fields, 0))
        except (KeyError, IndexError, ValueError) as error:
            known = " and ".join(f"{{{field}}}" for field in fields)
            reason = f"{type(error).__name__}: {error}"
            says = f"{template} is no template ({reason}); known fields: {known}"
            yield Problem(
                (flag,), says, f"{flag} out/{{rollout_id}}.pt" if dest != "save_hf" else f"{flag} out/{{rollout_id}}"
            )
            continue
        for field in needed:
            if f"{{{field}" not in template and a.num_rollout != 1:
                path = Path(template)
                legal = path.with_name(f"{path.stem}_{{{field}}}{path.suffix}")
                says = f"{template} lacks {{{field}}}: each rollout would overwrite the one before"
                yield Problem((flag,), says, f"{flag} {legal}")
    rollouts, train = a.save_debug_rollout_data, a.save_debug_train_data
    if rollouts is not None and rollouts == train:
        says = f"both are {rollouts}; one would overwrite the other"
        flags = ("--save-debug-rollout-data", "--save-debug-train-data")
        path = Path(train)
        yield Problem(flags, says, f"{flags[1]} {path.with_name('train_' + path.name)}")


def check_writable(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """What will be written can be: the nearest directory that exists allows it. A matter of this machine."""
    for dest in (*DIRECTORIES, *FILES):
        path = getattr(a, dest)
        if path is None or dest not in given:
            continue
        place = _first_existing(Path(path.split("{")[0]) if "{" in path else Path(path))
        if os.path.isfile(place) and dest in DIRECTORIES:
            yield Problem((given[dest],), f"{path}: {place} is a file", kind="absent")
        elif not os.access(place, os.W_OK):
            yield Problem((given[dest],), f"{path}: {place} cannot be written by this user", kind="absent")


def _first_existing(path: Path) -> Path:
    path = path.expanduser().absolute()
    return next(place for place in (path, *path.parents) if os.path.exists(place))


def _same(one: str, other: str) -> bool:
    return Path(one).absolute() == Path(other).absolute()


CHECKS = (check_saving, check_templates, check_writable)
