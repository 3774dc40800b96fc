"""The trainer on one rank: learning, log-probs, reference, hooks, errors (in tests/helpers/trainer_checks.py)."""

import pytest

from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.trainer_checks import check_names, run_checks


@pytest.fixture(scope="module")
def tracebacks(tmp_path_factory):
    hf = make_tiny_model("qwen3", tmp_path_factory.mktemp("models"))
    return run_ranks(run_checks, 1, str(hf), str(tmp_path_factory.mktemp("scratch")))[0]


@pytest.mark.parametrize("name", check_names())
def test_one_rank(tracebacks, name):
    if tracebacks[name]:
        pytest.fail(tracebacks[name], pytrace=False)
