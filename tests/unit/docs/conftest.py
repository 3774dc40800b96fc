"""The examples of the customization guide as files that flags can name."""

import re
from pathlib import Path

import pytest

from slime.rollout import data_source, eval_rollout, generate_state
from slime.utils.async_utils import run
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta
from tests.helpers.fake_generation_engine import FakeEngine
from tests.helpers.rollout_args import CharTokenizer

GUIDES = Path(__file__).resolve().parents[3] / "docs" / "en" / "get_started"


@pytest.fixture(scope="session")
def examples(tmp_path_factory) -> Path:
    """A directory with every Python block of the guides, under the name in its first line."""
    directory = tmp_path_factory.mktemp("examples")
    for page in ("quick_start.md", "customization.md"):
        for name, code in re.findall(
            r"^```python\n# (\w+\.py)\n(.*?)^```$", (GUIDES / page).read_text(), flags=re.M | re.S
        ):
            assert not (directory / name).exists(), f"two examples are called {name}"
            (directory / name).write_text(code)
    return directory


@pytest.fixture
def engine(monkeypatch):
    for module in (generate_state, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda *_, **__: CharTokenizer())
    SingletonMeta.clear_all_instances()
    eval_rollout._datasets.clear()
    with FakeEngine() as fake:
        yield fake
        run(close_http_client())
    SingletonMeta.clear_all_instances()
