r"""Grading of reasoning responses: the final answer stands in a `\boxed` (or `\fbox`) after the reasoning."""

from slime.rollout.rm_hub.math_utils import grade_answer_verl

_THINK_START, _THINK_END, _RESPONSE_MARKER = "<think>", "</think>", "###Response"


def get_deepscaler_rule_based_reward(response: str, label: object) -> int:
    """1 if the boxed answer behind the reasoning equals the label, else 0."""
    return int(grade_answer_verl(final_part(response), label))


def final_part(response: str) -> str:
    """What follows the last `</think>`, else the last `###Response`, else the whole response.

    A response that opens `<think>` and never closes it has no final part: "".
    """
    for marker in (_THINK_END, _RESPONSE_MARKER):
        _, found, rest = response.rpartition(marker)
        if found:
            return rest
    return "" if _THINK_START in response else response
