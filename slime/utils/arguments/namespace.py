"""The parsed arguments: a namespace that nobody can change after parsing."""

import argparse
from typing import Any


class Args(argparse.Namespace):
    """Every argument as an attribute. Assignment raises; pickle and copy work; `replace` gives a changed copy."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"arguments are read-only: make a copy with args.replace({name}={value!r})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"arguments are read-only: cannot delete {name}")

    def replace(self, **changes: Any) -> "Args":
        """A shallow copy with some values changed."""
        return type(self)(**{**self.__dict__, **changes})
