"""A config.json as the fact tables read it: typed look-ups whose errors name the field, its value and the file."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Composite models whose language model (text_config) can be described; the key is the outer model_type.
COMPOSITE = ("kimi_k25", "qwen3_5", "qwen3_5_moe")


class ConfigError(ValueError):
    """A config.json that cannot be described to Megatron; the message names file, field, value and rule."""


class UnknownModelType(ConfigError):
    """A model_type without a table of facts; the message lists the known ones, nearest first."""


@dataclass(frozen=True)
class Config:
    """The language model's fields, and the file they come from (for messages)."""

    fields: Mapping[str, Any]
    source: str

    @property
    def model_type(self) -> str:
        """The model_type, "" when the file states none."""
        return str(self.fields.get("model_type") or "")

    def need(self, key: str, kind: type = int) -> Any:
        """The value of a field that this model type must state, checked to be of `kind`; whole numbers are sizes."""
        value = self.get(key, kind)
        if value is None:
            raise ConfigError(f"{self.source}: {key} is missing, and {self.model_type} models need it")
        if kind is int and not 1 <= value <= _LARGEST_SIZE:
            raise self.error(key, f"is {value}, must be within 1 and {_LARGEST_SIZE:,}")
        return value

    def get(self, key: str, kind: type = int, default: Any = None) -> Any:
        """The value of a field, `default` when absent or null. A whole number is a good float; a bool is no number."""
        value = self.fields.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"is {value!r}, not {_NAMES.get(kind, kind.__name__)}")
        return value

    def error(self, key: str, says: str) -> ConfigError:
        """The error that says what is wrong with one field."""
        return ConfigError(f"{self.source}: {key} {says}")


_LARGEST_SIZE = 2**31 - 1  # sizes are 32-bit numbers to torch's kernels
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def load_config(path: Path) -> tuple[dict[str, Any], str]:
    """(the raw content of a config.json, the file's name for messages). path: the file or its directory.

    The file is read as it is: transformers' classes rename fields and add defaults of their own. Raises ConfigError
    for a missing or broken file.
    """
    file = path / "config.json" if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise ConfigError(f"{file}: there is no such file")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: holds a {type(config).__name__}, not an object")
    return config, str(file)


def language_model(config: Mapping[str, Any], source: str) -> Config:
    """The language model of a config: the config itself, or its text_config with what only the whole states."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return Config(config, source)
    outer = Config(config, source)
    if outer.model_type not in COMPOSITE:
        return outer  # its weights have names of their own: the table's look-up says that the type is unknown
    fields = {"model_type": outer.model_type, **text, "architectures": config.get("architectures")}
    tied = config.get("tie_word_embeddings")
    if fields.get("tie_word_embeddings") is None:
        fields["tie_word_embeddings"] = tied
    elif tied is not None and tied != fields["tie_word_embeddings"]:
        raise outer.error("tie_word_embeddings", f"is {tied}, and {fields['tie_word_embeddings']} in text_config")
    return Config(fields, source)
