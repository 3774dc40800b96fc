"""Copies of the model's weights on the host, under names ("actor", "ref"), and back into the live parameters."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class TensorBackuper:
    """Host copies of a set of named tensors. Each tag costs one copy of this rank's weights in host memory.

    named_tensors: gives (name, live tensor) pairs, the same names at each call.
    """

    def __init__(self, named_tensors: Callable[[], Iterable[tuple[str, Tensor]]], pin: bool) -> None:
        self._named_tensors = named_tensors
        self._pin = pin
        self._tags: dict[str, dict[str, Tensor]] = {}

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._tags)

    def get(self, tag: str) -> dict[str, Tensor]:
        """The host tensors of a tag, by name. KeyError when it was never backed up."""
        return self._tags[tag]

    @torch.no_grad()
    def backup(self, tag: str) -> None:
        """Copy the live tensors to the host under `tag`; memory is allocated the first time only."""
        host = self._tags.setdefault(tag, {})
        for name, tensor in self._named_tensors():
            if name not in host:
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
            host[name].copy_(tensor, non_blocking=True)
        self._wait()

    @torch.no_grad()
    def restore(self, tag: str) -> None:
        """Copy the tensors of `tag` into the live ones, in place."""
        host = self._tags[tag]
        for name, tensor in self._named_tensors():
            tensor.copy_(host[name], non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        if self._pin:
            torch.cuda.synchronize()
