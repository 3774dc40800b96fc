"""A broadcast of weights loads into target and draft model, on classes built like SGLang 0.5.17's."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils.draft_weights import reach_draft

REQUEST = SimpleNamespace(
    names=["lm_head.weight", "model.layers.4.eh_proj.weight"],
    dtypes=["float32"] * 2,
    shapes=[(2, 3), (3, 6)],
    group_name="slime-pp_1",
    load_format="flattened_bucket",
)


class Model:
    """Remembers what it loads, and takes the list apart while it does."""

    def __init__(self, fails: bool = False) -> None:
        self.loaded: list[str] = []
        self.fails = fails

    def load_weights(self, weights: list[tuple[str, Any]]) -> None:
        if self.fails:
            raise ValueError("no such shape")
        while weights:
            self.loaded.append(weights.pop(0)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """SGLang's WeightUpdater: frozen, with a group for each name."""

    get_model: Any
    _model_update_group: dict = field(default_factory=dict)

    def update_weights_from_distributed(self, names, dtypes, shapes, group_name, load_format):
        assert (dtypes, shapes, load_format) == (REQUEST.dtypes, REQUEST.shapes, REQUEST.load_format)
        try:
            self._model_update_group[group_name].append(names)  # one receive for all models
            self.get_model().load_weights([(name, None) for name in names])
        except ValueError as error:
            return False, str(error)
        return True, "done"


def runner(model, path="/models/glm", groups=None):
    updater = Updater(get_model=lambda: model, _model_update_group=groups if groups is not None else {})
    return SimpleNamespace(model=model, model_config=SimpleNamespace(model_path=path), weight_updater=updater)


class Worker:
    """SGLang's TpModelWorker."""

    def __init__(self, model_runner: Any) -> None:
        self.model_runner = model_runner

    def update_weights_from_distributed(self, request: Any) -> tuple[bool, str]:
        received = (request.names, request.dtypes, request.shapes, request.group_name, request.load_format)
        return self.model_runner.weight_updater.update_weights_from_distributed(*received)


@pytest.fixture
def manager_class():
    @dataclass(kw_only=True, slots=True)
    class Manager:
        """SGLang's SchedulerWeightUpdaterManager."""

        tp_worker: Any
        draft_worker: Any

        def update_weights_from_distributed(self, request: Any) -> tuple[bool, str]:
            return self.tp_worker.update_weights_from_distributed(request)

    reach_draft(Manager)
    return Manager


def speculating(manager_class, draft_path="/models/glm", draft_fails=False):
    groups = {REQUEST.group_name: []}
    target, draft = Model(), Model(draft_fails)
    inner = SimpleNamespace(draft_runners=[runner(draft, draft_path)])
    worker = Worker(runner(target, groups=groups))
    manager = manager_class(tp_worker=worker, draft_worker=SimpleNamespace(draft_worker=inner))
    return manager, worker, target, draft, groups[REQUEST.group_name]


def test_the_prediction_layer_gets_what_the_target_gets(manager_class):
    manager, worker, target, draft, receives = speculating(manager_class)
    assert manager.update_weights_from_distributed(REQUEST) == (True, "done")
    assert target.loaded == draft.loaded == REQUEST.names and receives == [REQUEST.names]
    assert manager.tp_worker is worker


def test_a_failure_is_told_and_leaves_the_manager_as_it_was(manager_class):
    manager, worker, _, _, _ = speculating(manager_class, draft_fails=True)
    assert manager.update_weights_from_distributed(REQUEST) == (False, "no such shape")
    assert manager.tp_worker is worker


def test_a_draft_of_another_checkpoint_is_left_alone(manager_class):
    manager, _, target, draft, _ = speculating(manager_class, draft_path="/models/eagle3")
    assert manager.update_weights_from_distributed(REQUEST) == (True, "done")
    assert target.loaded == REQUEST.names and draft.loaded == []


@pytest.mark.parametrize("speculative", [None, SimpleNamespace(draft_worker=None), SimpleNamespace()])
def test_without_a_draft_model_nothing_changes(manager_class, speculative):
    target = Model()
    worker = Worker(runner(target, groups={REQUEST.group_name: []}))
    manager = manager_class(tp_worker=worker, draft_worker=speculative)
    assert manager.update_weights_from_distributed(REQUEST) == (True, "done")
    assert target.loaded == REQUEST.names
