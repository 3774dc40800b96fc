"""Which datasets an evaluation runs on and how: entries of `--eval-config` or `--eval-prompt-data`, fully resolved.

Each field is taken from the dataset's entry, else from the file's `defaults`, else from the command line.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

logger = logging.getLogger(__name__)

# Attributes of args that stand in for a field neither the entry nor the defaults give; the first not None wins.
_ARGS_CHAINS = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "custom_rm_path": ("custom_rm_path",),
}

# Read by evaluation functions of users, not by the built-in one.
_FOR_CUSTOM_FUNCTIONS = (
    "app_service",
    "eval_task_timeout",
    "min_eval_samples",
    "eval_early_stop_remaining",
    "eval_early_stop_idle_timeout",
    "message_processor",
    "reward_model",
    "remote_environment",
)


@dataclass
class EvalDatasetConfig:
    """One evaluation dataset. ValueError for a value out of range, naming dataset, field, value and legal range.

    custom_rm_path: None = whatever the command line says; "" = the built-in grader `rm_type`, also when the command
    line has a --custom-rm-path. temperature 0 means greedy decoding.
    """

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict | None = None

    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict | None = None

    app_service: Any = None
    eval_task_timeout: float | None = None
    min_eval_samples: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: str | None = None
    reward_model: Any = None
    remote_environment: Any = None

    def __post_init__(self):
        for name in ("name", "path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"eval dataset {self.name!r}: {name} must be a non-empty string")
        for name in ("temperature", "top_p", "repetition_penalty"):  # YAML reads 1e-1 as text
            if isinstance(getattr(self, name), str):
                setattr(self, name, self._float(name))
        self._check("temperature", self.temperature, lambda v: v >= 0, ">= 0 (0 is greedy)")
        self._check("top_p", self.top_p, lambda v: 0 < v <= 1, "within (0, 1]")
        self._check("top_k", self.top_k, lambda v: v == -1 or v >= 1, "-1 (off) or >= 1")
        self._check("repetition_penalty", self.repetition_penalty, lambda v: v > 0, "> 0")
        self._check("min_new_tokens", self.min_new_tokens, lambda v: v >= 0, ">= 0")
        for name in ("n_samples_per_eval_prompt", "max_response_len", "min_eval_samples"):
            self._check(name, getattr(self, name), lambda v: v >= 1, ">= 1")

    def _float(self, name: str) -> float:
        text = getattr(self, name)
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"eval dataset {self.name!r}: {name} is {text!r}, must be a number") from None

    def _check(self, name: str, value: Any, legal: Callable[[Any], bool], rule: str) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not legal(value):
            raise ValueError(f"eval dataset {self.name!r}: {name} is {value!r}, must be {rule}")


FIELD_NAMES = tuple(f.name for f in fields(EvalDatasetConfig))


def eval_datasets_from_args(args: Any) -> list[EvalDatasetConfig]:
    """The evaluation datasets of a run: from `args.eval_config` if given, else `args.eval_prompt_data`, else none."""
    if args.eval_config:
        entries, defaults = read_eval_config(args.eval_config)
    elif args.eval_prompt_data:
        entries, defaults = _pairs(args.eval_prompt_data), {}
    else:
        return []
    return build_eval_dataset_configs(args, entries, defaults)


def read_eval_config(path: str) -> tuple[list[dict], dict]:
    """(entries, defaults) of a YAML or JSON file; its content may stand under a top-level `eval:` key.

    `datasets` is a list of mappings with `name`, or a mapping from name to the rest. Raises FileNotFoundError,
    yaml.YAMLError, and ValueError for another shape.
    """
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    root = content.get("eval", content) if isinstance(content, dict) else content
    if not isinstance(root, dict) or not root.get("datasets"):
        raise ValueError(f"{path}: needs a non-empty `datasets:` (at the top or under `eval:`)")
    unknown = sorted(set(root) - {"defaults", "datasets"})
    if unknown:
        raise ValueError(f"{path}: unknown keys {unknown} beside `defaults` and `datasets`")
    datasets, defaults = root["datasets"], root.get("defaults") or {}
    if isinstance(datasets, dict):
        datasets = [{"name": name, **(entry or {})} for name, entry in datasets.items()]
    if not isinstance(datasets, list) or not all(isinstance(entry, dict) for entry in datasets):
        raise ValueError(f"{path}: `datasets` must be a list of mappings, or a mapping from name to mapping")
    if not isinstance(defaults, dict):
        raise ValueError(f"{path}: `defaults` must be a mapping, got {type(defaults).__name__}")
    return datasets, defaults


def build_eval_dataset_configs(args: Any, entries: list[dict], defaults: dict) -> list[EvalDatasetConfig]:
    """Resolve every entry against `defaults` and `args`.

    Raises ValueError for an unknown key in defaults, TypeError for one in an entry (both list the valid keys), and
    ValueError for a name that occurs twice.
    """
    unknown = sorted(set(defaults) - set(FIELD_NAMES) | (set(defaults) & {"name", "path"}))
    if unknown:
        valid = ", ".join(name for name in FIELD_NAMES if name not in ("name", "path"))
        raise ValueError(f"eval defaults: unknown keys {unknown}; valid keys: {valid}")
    configs = [_resolve(args, entry, defaults) for entry in entries]
    names = [config.name for config in configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"eval datasets: names {twice} occur more than once; metrics are kept by name")
    return configs


def _resolve(args: Any, entry: dict, defaults: dict) -> EvalDatasetConfig:
    name = entry.get("name")
    unknown = sorted(set(entry) - set(FIELD_NAMES))
    if unknown:
        raise TypeError(f"eval dataset {name!r}: unknown keys {unknown}; valid keys: {', '.join(FIELD_NAMES)}")
    missing = [key for key in ("name", "path") if key not in entry]
    if missing:
        raise ValueError(f"eval dataset {name!r}: {missing} must be given")
    values = {**defaults, **entry}
    chooses_grader = values.get("rm_type") and values.get("custom_rm_path") is None
    if chooses_grader or (entry.get("rm_type") and "custom_rm_path" not in entry):
        values["custom_rm_path"] = ""
    for key, chain in _ARGS_CHAINS.items():
        if values.get(key) is None:
            values[key] = next((v for v in (getattr(args, attr, None) for attr in chain) if v is not None), None)
    unread = [key for key in _FOR_CUSTOM_FUNCTIONS if values.get(key) is not None]
    if unread:
        logger.warning("eval dataset %r: %s only reach a custom evaluation function", name, ", ".join(unread))
    return EvalDatasetConfig(**values)


def _pairs(words: list[str]) -> list[dict]:
    """Entries of `--eval-prompt-data name path [name path ...]`; one lone path is named "aime"."""
    if len(words) == 1:
        return [{"name": "aime", "path": words[0]}]
    if len(words) % 2:
        raise ValueError(f"--eval-prompt-data: needs pairs of name and path, got {len(words)} words: {words}")
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]
