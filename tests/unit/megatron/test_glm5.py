"""Sparse attention (GLM-5.2, DeepSeek-V3.2) in the trainer, against transformers and naive loops."""

import pytest

from tests.helpers import glm5_checks
from tests.helpers.glm5_reference import write_indexer_reference, write_reference
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    paths = {name: make_tiny_model(name, directory) for name in ("glm5_2", "deepseek_v32")}
    for path in paths.values():
        write_reference(path, path / "reference")
    write_indexer_reference(paths["glm5_2"], paths["glm5_2"] / "reference")
    return paths


def test_in_layouts(models, tmp_path):
    """All checks of tests/helpers/glm5_checks.py, whose names say what they are about."""
    run_ranks(glm5_checks.run_checks, glm5_checks.WORLD, models, tmp_path, glm5_checks.check_names())
