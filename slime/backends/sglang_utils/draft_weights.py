"""Weights pushed by broadcast reach the draft model of a server that speculates with its own checkpoint's layers.

SGLang 0.5.17 gives the draft model what comes by handles or from disk, and leaves it out of broadcasts: a prediction
layer that trains would draft with the weights it started with. Not needed once SGLang's broadcasts reach it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any


def reach_draft(manager_class: type) -> None:
    """manager_class: SGLang's SchedulerWeightUpdaterManager, whose broadcasts then load into both models.

    A draft model with a checkpoint of its own (EAGLE-3 heads, a smaller model) is left alone: it has other weights.
    """
    plain = manager_class.update_weights_from_distributed

    def update_weights_from_distributed(self: Any, recv_req: Any) -> Any:
        target = self.tp_worker
        drafts = _draft_models(self.draft_worker, target.model_runner)
        if not drafts:
            return plain(self, recv_req)
        self.tp_worker = _TargetAndDraft(target, drafts)
        try:
            return plain(self, recv_req)
        finally:
            self.tp_worker = target

    manager_class.update_weights_from_distributed = update_weights_from_distributed


def _draft_models(speculative: Any, target: Any) -> list[Any]:
    """Models of the worker `speculative` (or None) whose checkpoint is that of the model runner `target`."""
    worker = getattr(speculative, "draft_worker", None)  # None as well: drafting without a model
    runners = getattr(worker, "draft_runners", ())
    return [runner.model for runner in runners if runner.model_config.model_path == target.model_config.model_path]


class _TargetAndDraft:
    """A target worker, as far as a broadcast needs one, that loads what it receives into the draft models too."""

    def __init__(self, target: Any, drafts: Sequence[Any]) -> None:
        self._updater, self._drafts = target.model_runner.weight_updater, drafts

    def update_weights_from_distributed(self, recv_req: Any) -> tuple[bool, str]:
        """As SGLang's TpModelWorker. The receiving group is shared with the target's updater."""
        updater = replace(self._updater, get_model=self._models)
        received = (recv_req.names, recv_req.dtypes, recv_req.shapes, recv_req.group_name, recv_req.load_format)
        return updater.update_weights_from_distributed(*received)

    def _models(self) -> "_Models":
        return _Models([self._updater.get_model(), *self._drafts])


class _Models:
    """Several models that load the same weights; each takes those it knows by name."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        weights = list(weights)
        for model in self._models:
            model.load_weights(list(weights))
