"""`--rollout-sample-hook-path`: user functions that see, or replace, every sample between generation and reward."""

import inspect
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from typing import Any

from slime.utils.misc import load_function
from slime.utils.types import Sample


async def apply_sample_hooks(
    args: Namespace, samples: Sample | list, *, rollout_id: int | None, evaluation: bool
) -> Sample | list:
    """Run the hooks in order on every leaf of `samples`, keeping the nesting.

    A hook is called `hook(args, sample, rollout_id=..., evaluation=...)` with the keywords it declares, may be async,
    and returns a Sample or, having changed the one it was given, None. Anything else raises TypeError.
    """
    if not args.rollout_sample_hook_path:
        return samples
    if isinstance(samples, list):
        return [await apply_sample_hooks(args, s, rollout_id=rollout_id, evaluation=evaluation) for s in samples]
    keywords = {"rollout_id": rollout_id, "evaluation": evaluation}
    for path in args.rollout_sample_hook_path:
        hook = load_function(path)
        result = hook(args, samples, **{k: v for k, v in keywords.items() if accepts_keyword(hook, k)})
        if inspect.isawaitable(result):
            result = await result
        if result is not None and not isinstance(result, Sample):
            raise TypeError(
                f"--rollout-sample-hook-path {path} must return a Sample or None, got {type(result).__name__}"
            )
        samples = samples if result is None else result
    return samples


@cache
def accepts_keyword(fn: Callable[..., Any], name: str) -> bool:
    """Whether `fn` can be called with the keyword `name`: declared, or swallowed by **kwargs."""
    parameters = inspect.signature(fn).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return True
    return name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
