"""Bridges of every family that trains: Hugging Face -> Megatron -> Hugging Face, in layouts, against transformers."""

import pytest

from tests.helpers import bridge_checks
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_models import make_tiny_model

FAMILIES = (
    "qwen2",
    "qwen3_tied",
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v3",
    "deepseek_v3_plain_queries",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    return {name: make_tiny_model(name, directory) for name in FAMILIES}


def test_bridges_in_layouts(models, tmp_path):
    """All checks of tests/helpers/bridge_checks.py, whose names say what they are about."""
    run_ranks(bridge_checks.run_checks, bridge_checks.WORLD, models, tmp_path, bridge_checks.check_names())
