"""Fixtures of the rollout tests: a fake engine, a tokenizer without files, fresh process-wide state for every test."""

from collections.abc import Iterator

import pytest

from slime.rollout import data_source, eval_rollout, generate_state
from slime.utils.async_utils import run
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta
from tests.helpers.fake_generation_engine import FakeEngine
from tests.helpers.rollout_args import CharTokenizer


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    for module in (generate_state, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda *_, **__: CharTokenizer())
    SingletonMeta.clear_all_instances()
    eval_rollout._datasets.clear()
    with FakeEngine() as fake:
        yield fake
        run(close_http_client())
    SingletonMeta.clear_all_instances()
