"""Prompt files: reading `.jsonl` / `.parquet` with row slices, and `Dataset`, which turns rows into samples.

Every complaint about a row names `file:line`; every row that is left out is counted.
"""

import json
import logging
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from slime.utils.processing_utils import build_processor_kwargs, process_vision_info
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<slice>[^\[\]]*)\]$")
_BOUNDS = re.compile(r"^\s*(-?\d+)?\s*:\s*(-?\d+)?\s*$")
_PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}


# ---- files ----


def read_file(path: str | Path, *, skip_malformed: bool = False) -> Iterator[dict]:
    """Rows of a `.jsonl` or `.parquet` file as dicts, in file order.

    `path@[start:end]` selects rows with Python's slice meaning (either bound may be left out or negative, no step);
    blank lines are no rows. Raises FileNotFoundError, ValueError for another suffix or a bad slice, and ValueError
    `path:line: ...` for a malformed row, unless `skip_malformed`, which leaves it out and logs how many there were.
    """
    return (row for _, row in _Reader(path, skip_malformed).rows())


class _Reader:
    """Numbered rows of one file; `num_skipped` counts malformed rows left out so far."""

    def __init__(self, path: str | Path, skip_malformed: bool):
        self.path, self._bounds = _split_slice(str(path))
        if self.path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"{self.path}: prompt files are .jsonl or .parquet, not {self.path.suffix!r}")
        if not self.path.is_file():
            raise FileNotFoundError(f"prompt file {self.path} does not exist")
        self.num_skipped = 0
        self._skip_malformed = skip_malformed

    def rows(self) -> Iterator[tuple[str, dict]]:
        """Pairs (`path:number`, row); numbers are lines of a jsonl file, rows of a parquet file, from 1."""
        rows = self._jsonl_rows() if self.path.suffix == ".jsonl" else self._parquet_rows()
        start, end = self._bounds
        if (start or 0) < 0 or (end or 0) < 0:
            rows = iter(list(rows)[start:end])
        else:
            rows = islice(rows, start, end)
        yield from rows
        if self.num_skipped:
            logger.warning("%s: skipped %d malformed rows", self.path, self.num_skipped)

    def _jsonl_rows(self) -> Iterator[tuple[str, dict]]:
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{self.path}:{number}"
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
                except ValueError as error:  # JSONDecodeError is one
                    if not self._skip_malformed:
                        raise ValueError(
                            f"{where}: malformed row: {error}; fix it or pass --skip-malformed-rows"
                        ) from error
                    self.num_skipped += 1
                    logger.warning("%s: skipped malformed row: %s", where, error)
                    continue
                yield where, row

    def _parquet_rows(self) -> Iterator[tuple[str, dict]]:
        import pyarrow.parquet

        number = 0
        with pyarrow.parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{self.path}:{number}", row


def _split_slice(path: str) -> tuple[Path, tuple[int | None, int | None]]:
    match = _SLICE.match(path)
    if match is None or Path(path).is_file():
        return Path(path), (None, None)
    bounds = _BOUNDS.match(match["slice"])
    if bounds is None:
        raise ValueError(f"{path}: the row selection must be @[start:end] with integers, got @[{match['slice']}]")
    start, end = (None if bound is None else int(bound) for bound in bounds.groups())
    return Path(match["path"]), (start, end)


# ---- dataset ----


class Dataset:
    """The prompts of one file as `Sample`s, shuffled anew each epoch.

    samples: the current order; origin_samples: file order. num_skipped: malformed rows left out (`skip_malformed`);
    num_filtered: prompts longer than `max_length` tokens left out.

    A string prompt stays a string unless a chat template is applied or `multimodal_keys` is given; then it becomes one
    user message. `max_length` applies to rendered prompts; message lists have no length yet and pass with a warning.

    Raises ValueError `path:line: ...` for a row without the asked keys or with a prompt that is neither text nor a
    message list, and ValueError when no row is left.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer: Any = None,
        processor: Any = None,
        max_length: int | None = None,
        input_key: str = "input",
        label_key: str | None = None,
        metadata_key: str = "metadata",
        tool_key: str | None = None,
        multimodal_keys: dict[str, str] | None = None,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict | None = None,
        seed: int = 42,
        skip_malformed: bool = False,
    ):
        unknown = sorted(set(multimodal_keys or ()) - set(_PLACEHOLDERS))
        if unknown:
            raise ValueError(f"--multimodal-keys: unknown types {unknown}, known: {list(_PLACEHOLDERS)}")
        if tokenizer is None and (apply_chat_template or max_length is not None):
            raise ValueError("a chat template or a prompt length limit needs a tokenizer")
        self._tokenizer, self._processor = tokenizer, processor
        self._input_key, self._label_key = input_key, label_key
        self._metadata_key, self._tool_key = metadata_key, tool_key
        self._multimodal_keys = multimodal_keys or {}
        self._apply_chat_template = apply_chat_template
        self._template_kwargs = apply_chat_template_kwargs or {}

        reader = _Reader(path, skip_malformed)
        samples = [self._sample(where, row) for where, row in reader.rows()]
        self.num_skipped = reader.num_skipped
        self.origin_samples = samples if max_length is None else self._short_enough(samples, max_length)
        self.num_filtered = len(samples) - len(self.origin_samples)
        if self.num_filtered:
            logger.warning(
                "%s: left out %d of %d prompts longer than %d tokens",
                path,
                self.num_filtered,
                len(samples),
                max_length,
            )
        if not self.origin_samples:
            too_long = "" if max_length is None else f", {self.num_filtered} prompts longer than {max_length} left out"
            raise ValueError(
                f"{path}: no prompt is left: {len(samples)} rows selected and read, {self.num_skipped} malformed rows "
                f"skipped{too_long}"
            )
        self.samples = self.origin_samples
        self.epoch_id = -1
        self._seed = seed

    def shuffle(self, epoch_id: int) -> None:
        """Put the samples in the order of this epoch: a permutation of file order seeded with seed + epoch_id."""
        if epoch_id == self.epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self._seed + epoch_id).shuffle(order)
        self.samples = [self.origin_samples[i] for i in order]
        self.epoch_id = epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)

    # ---- one row ----

    def _sample(self, where: str, row: dict) -> Sample:
        prompt = _column(where, row, self._input_key, "--input-key")
        label = None if self._label_key is None else _column(where, row, self._label_key, "--label-key")
        metadata = dict(_json_column(where, row, self._metadata_key, dict) or {})
        tools = None if self._tool_key is None else _json_column(where, row, self._tool_key, list)
        if tools is not None:
            metadata["tools"] = tools

        if isinstance(prompt, str):
            if self._apply_chat_template or self._multimodal_keys:
                prompt = [{"role": "user", "content": prompt}]
        elif not _is_message_list(prompt):
            raise ValueError(
                f"{where}: {self._input_key!r} must be text or a list of messages with a role, "
                f"got {type(prompt).__name__} {str(prompt)[:80]!r}"
            )
        multimodal_inputs = None
        if isinstance(prompt, list):
            if self._multimodal_keys:
                prompt = _insert_media(where, prompt, row, self._multimodal_keys)
            if self._processor is not None:
                multimodal_inputs = process_vision_info(prompt, self._processor)
            if self._apply_chat_template:
                prompt = self._render(where, prompt, tools)
        return Sample(prompt=prompt, label=label, metadata=metadata, multimodal_inputs=multimodal_inputs)

    def _render(self, where: str, messages: list[dict], tools: list | None) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **self._template_kwargs
            )
        except Exception as error:  # templates raise their own errors, which do not know the row
            raise ValueError(f"{where}: the chat template fails on this prompt: {error}") from error

    # ---- length filter ----

    def _short_enough(self, samples: list[Sample], max_length: int) -> list[Sample]:
        lengths = self._prompt_lengths(samples)
        return [s for s, n in zip(samples, lengths, strict=True) if n is None or n <= max_length]

    def _prompt_lengths(self, samples: list[Sample]) -> list[int | None]:
        """Tokens of each prompt as the engine will see it; None for message lists, which are not rendered yet."""
        lengths: list[int | None] = [None] * len(samples)
        plain = [i for i, s in enumerate(samples) if isinstance(s.prompt, str) and not s.multimodal_inputs]
        if plain:
            texts = [samples[i].prompt for i in plain]
            for i, ids in zip(plain, self._tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
                lengths[i] = len(ids)
        for i, sample in enumerate(samples):
            if isinstance(sample.prompt, str) and sample.multimodal_inputs:
                inputs = self._processor(text=[sample.prompt], **build_processor_kwargs(sample.multimodal_inputs))
                lengths[i] = len(inputs["input_ids"][0])
        unknown = sum(n is None for n in lengths)
        if unknown:
            logger.warning("%d prompts are message lists; the prompt length limit does not apply to them", unknown)
        return lengths


def get_source(sample: Sample) -> str:
    """Where a sample comes from: its `source` attribute, its metadata's `source_name`, or "unknown"."""
    source = getattr(sample, "source", None)
    if source is None:
        source = (sample.metadata or {}).get("source_name")
    return "unknown" if source is None else str(source)


def _column(where: str, row: dict, key: str, flag: str) -> Any:
    if key not in row:
        raise ValueError(
            f'{where}: "{key}" is missing (keys: {", ".join(map(str, row))}); pass {flag} with one of them'
        )
    return row[key]


def _json_column[T: (dict, list)](where: str, row: dict, key: str, kind: type[T]) -> T | None:
    """An optional column holding a dict or list, or JSON text of one; an empty text means no value."""
    value = row.get(key)
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f'{where}: "{key}" is text but not JSON: {error}') from error
    if kind is list and value is not None and not isinstance(value, dict | list | str | int | float):
        value = list(value)  # tuple, numpy array
    if value is not None and not isinstance(value, kind):
        raise ValueError(
            f'{where}: "{key}" must be a {kind.__name__} (or its JSON text), got {type(value).__name__} '
            f"{str(value)[:80]!r}"
        )
    return value


def _is_message_list(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in prompt)
    )


def _insert_media(where: str, messages: list[dict], row: dict, keys: dict[str, str]) -> list[dict]:
    """Messages with each placeholder in string contents replaced by the row's next item of that type.

    keys: {type: column}. Items that are dicts are content items already; others become {"type": type, type: item}.
    Raises ValueError unless placeholders and items are equally many.
    """
    items = {kind: _media_items(row.get(column)) for kind, column in keys.items()}
    pattern = re.compile("(" + "|".join(_PLACEHOLDERS[kind] for kind in keys) + ")")
    kind_of = {_PLACEHOLDERS[kind]: kind for kind in keys}
    used = dict.fromkeys(keys, 0)
    result, explicit = [], False
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str):
            explicit = explicit or content is not None
            result.append(message)
            continue
        pieces = []
        for piece in pattern.split(content):
            kind = kind_of.get(piece)
            if kind is None:
                pieces.extend([{"type": "text", "text": piece}] if piece else [])
                continue
            if used[kind] < len(items[kind]):
                item = items[kind][used[kind]]
                pieces.append(item if isinstance(item, dict) and "type" in item else {"type": kind, kind: item})
            used[kind] += 1
        result.append({**message, "content": pieces or content})
    if explicit:
        logger.warning("%s: contents that are lists already are left as they are", where)
    for kind, column in keys.items():
        enough = used[kind] == len(items[kind]) or (explicit and used[kind] < len(items[kind]))
        if not enough:
            raise ValueError(
                f'{where}: {used[kind]} {_PLACEHOLDERS[kind]} placeholders but {len(items[kind])} items in "{column}"'
            )
    return result


def _media_items(value: Any) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
