"""Rules of rewards: a known grader, with what it needs to grade."""

import difflib
from argparse import Namespace
from collections.abc import Iterator, Mapping

from slime.utils.arguments.flag import Problem
from slime.utils.reward_types import BOXED, BUILT_IN, NEED_LABEL, NOT_YET, SCORE_DICT

FLAG = "--rm-type"


def check_reward_type(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """Each reward type is one of the built-in graders. Rows may name others: those are known at run time only."""
    if a.debug_train_only:
        return
    if a.rm_type is not None:
        yield from _check_name(FLAG, a.rm_type, "")
    for data in a.eval_datasets:
        if data.rm_type and not (data.custom_rm_path or (data.custom_rm_path is None and a.custom_rm_path)):
            yield from _check_name("--eval-config", data.rm_type, f"{data.name}: rm_type ")


def _check_name(flag: str, name: str, where: str) -> Iterator[Problem]:
    kind = name.strip().removeprefix(BOXED)
    legal = FLAG if flag == FLAG else "rm_type:"
    if kind in NOT_YET:
        says = f"{where}{name} is not supported yet by this version of slime"
        yield Problem((flag,), says, f"{legal} math", kind="unsupported")
    elif kind not in BUILT_IN:
        near = difflib.get_close_matches(kind, BUILT_IN, n=1, cutoff=0.5)
        known = ", ".join(BUILT_IN)
        says = f"{where}{name} is unknown; known: {known} (with {BOXED} in front if wanted), or --custom-rm-path"
        yield Problem((flag,), says, f"{legal} {near[0] if near else BUILT_IN[0]}")


def check_reward_needs(a: Namespace, given: Mapping[str, str]) -> Iterator[Problem]:
    """The built-in grader has what it reads: labels, an address, and a name for the number in its answer."""
    if a.debug_train_only or a.custom_rm_path or a.rm_type is None or a.num_rollout == 0:
        return
    kind = a.rm_type.strip().removeprefix(BOXED)
    builtin_data = a.rollout_global_dataset and "data_source_path" not in given
    makes_labels = a.custom_generate_function_path or a.rollout_sample_hook_path or "rollout_function_path" in given
    if kind in NEED_LABEL and a.label_key is None and a.prompt_data and builtin_data and not makes_labels:
        says = (
            f"is not given, and {FLAG} {a.rm_type} compares with a label: every reward would be that of a wrong answer"
        )
        yield Problem(("--label-key",), says, "--label-key label")
    if kind == "remote_rm" and not a.rm_url:
        says = f"is not given, and {FLAG} {a.rm_type} asks a service"
        yield Problem(("--rm-url",), says, "--rm-url http://127.0.0.1:8000/score")
    if kind in SCORE_DICT and not a.reward_key and not a.custom_reward_post_process_path:
        says = f"is not given, and the reward of {FLAG} {a.rm_type} is a dict ({', '.join(SCORE_DICT[kind])})"
        yield Problem(("--reward-key",), says, f"--reward-key {SCORE_DICT[kind][0]}")


CHECKS = (check_reward_type, check_reward_needs)
