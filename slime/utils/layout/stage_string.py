"""The text form of a pipeline layout: stages separated by |, one letter per layer, n-fold repetition by *n."""

import re
from collections.abc import Sequence

LETTERS = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss"}
_REPEATED_GROUP = re.compile(r"\((?P<what>[^)]+)\)\*(?P<times>\d+)")
_REPEATED_LETTER = re.compile(r"(?P<what>.)\*(?P<times>\d+)")
MAX_REPETITIONS = 10_000


def parse_stages(text: str) -> list[str]:
    """The letters of each stage: "Et|(t|)*2,mL" is ["Et", "t", "t", "mL"]. Commas mean nothing.

    Groups are repeated first, then single letters, a | included; groups do not nest. ValueError for anything else.
    """
    plain = text.replace(",", "")
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):
        plain = pattern.sub(_repeat, plain)
    unknown = next((letter for letter in plain if letter not in LETTERS and letter != "|"), None)
    if unknown is not None:
        legal = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
        raise ValueError(f"{text} holds {unknown!r}; legal are {legal}, | between stages, x*n and (xy)*n")
    return plain.split("|")


def stage_string(counts: Sequence[int], mtp_layers: int = 0) -> str:
    """The layout with `counts[i]` decoder layers on stage i: embedding first, MTP layers and loss last."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    mtp = f"m*{mtp_layers}" if mtp_layers > 1 else "m" * mtp_layers
    stages[0], stages[-1] = "E" + stages[0], ("E" if len(stages) == 1 else "") + stages[-1] + mtp + "L"
    return "|".join(stages)


def _repeat(match: re.Match) -> str:
    times = int(match["times"])
    if times > MAX_REPETITIONS:
        raise ValueError(f"repeats {match['what']} {times} times; no pipeline is that long")
    return match["what"] * times
