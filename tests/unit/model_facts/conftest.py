"""A checkpoint directory that holds nothing but a config.json."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(config) -> a directory with that config.json."""

    def write(config: dict | str) -> Path:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
        return tmp_path

    return write
