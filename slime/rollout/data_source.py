"""Where prompts come from: a dataset read in epochs, and a buffer of groups that an earlier rollout gave back.

A data source hands out groups, `n_samples_per_prompt` samples of one prompt; it knows nothing of generation.
"""

import abc
import copy
import logging
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.rollout.debug_dump import load_plain, save_plain
from slime.utils.data import Dataset
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


class DataSource(abc.ABC):
    """What `--data-source-path` must name: a class of this shape, called with `args`."""

    @abc.abstractmethod
    def __init__(self, args: Namespace): ...

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """`num_samples` groups."""

    @abc.abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back; a later get_samples hands them out again. NotImplementedError if this source cannot."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Store the position after rollout `rollout_id`."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Continue after rollout `rollout_id`; None or -1 is a fresh start."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Prompts in one epoch."""


class RolloutDataSource(DataSource):
    """The prompts of `--prompt-data` in order, or shuffled anew each epoch; without a dataset, empty samples."""

    def __init__(self, args: Namespace):
        self.args = args
        self.epoch_id = 0
        self.sample_offset = 0  # prompts of this epoch already handed out
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.dataset = self._load_dataset() if args.rollout_global_dataset and args.prompt_data else None

    def _load_dataset(self) -> Dataset:
        args = self.args
        dataset = Dataset(
            args.prompt_data,
            tokenizer=load_tokenizer(args.hf_checkpoint),
            processor=load_processor(args.hf_checkpoint) if args.multimodal_keys else None,
            max_length=args.rollout_max_prompt_len,
            input_key=args.input_key,
            label_key=args.label_key,
            tool_key=args.tool_key,
            metadata_key=args.metadata_key,
            multimodal_keys=args.multimodal_keys,
            apply_chat_template=args.apply_chat_template,
            apply_chat_template_kwargs=args.apply_chat_template_kwargs,
            seed=args.rollout_seed,
            skip_malformed=args.skip_malformed_rows,
        )
        if args.rollout_shuffle:
            dataset.shuffle(0)
        return dataset

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [self._new_group(prompt) for prompt in self._next_prompts(num_samples)]

    def _next_prompts(self, num_prompts: int) -> list[Sample]:
        """The next prompts, going through as many epochs as that takes."""
        if self.dataset is None:
            return [Sample() for _ in range(num_prompts)]
        prompts: list[Sample] = []
        while len(prompts) < num_prompts:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                if self.args.rollout_shuffle:
                    self.dataset.shuffle(self.epoch_id)
            end = min(self.sample_offset + num_prompts - len(prompts), len(self.dataset))
            prompts += self.dataset.samples[self.sample_offset : end]
            self.sample_offset = end
        return prompts

    def _new_group(self, prompt: Sample) -> list[Sample]:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} has no buffer to take groups back; use --data-source-path "
            "slime.rollout.data_source.RolloutDataSourceWithBuffer"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything a later run needs to hand out the very same samples from here on."""
        return {
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
            "num_prompts": len(self),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sample_offset = state["sample_offset"]
        self.epoch_id = state["epoch_id"]
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = state["metadata"]
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)
        stored = state.get("num_prompts", len(self))
        if stored != len(self):
            logger.warning(
                "the data source was saved with %d prompts and now has %d: it continues at prompt %d of epoch %d of "
                "the new data, some prompts may repeat or be left out",
                stored,
                len(self),
                self.sample_offset,
                self.epoch_id,
            )

    def save(self, rollout_id: int) -> None:
        if self.args.rollout_global_dataset and self.args.save is not None:
            save_plain(self.state_dict(), _state_path(self.args.save, rollout_id))

    def load(self, rollout_id: int | None = None) -> None:
        """Restore the state saved after `rollout_id`, looking in `--load` and then in `--save`.

        A missing file is a warning, not an error: the weights may come from a run on other data.
        """
        args = self.args
        if not args.rollout_global_dataset or rollout_id is None or rollout_id < 0:
            return
        candidates = [_state_path(folder, rollout_id) for folder in (args.load, args.save) if folder is not None]
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            logger.warning(
                "no data source state for rollout %d in %s: prompts start again from the first one",
                rollout_id,
                [str(path) for path in candidates],
            )
            return
        self.load_state_dict(load_plain(path))
        logger.info("data source continues at prompt %d of epoch %d (%s)", self.sample_offset, self.epoch_id, path)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A data source that takes groups back and hands them out before new prompts. Its methods may be called from any
    thread.
    """

    def __init__(self, args: Namespace):
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        self._lock = threading.Lock()
        self._buffer_filter = load_function(args.buffer_filter_path) if args.buffer_filter_path else pop_first

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self._lock:
            groups = list(self._buffer_filter(self.args, None, self.buffer, num_samples)) if self.buffer else []
            if len(groups) > num_samples:
                raise ValueError(
                    f"--buffer-filter-path returned {len(groups)} groups, at most {num_samples} were asked for"
                )
            return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples: list[list[Sample]]) -> None:
        for group in samples:
            if not isinstance(group, list) or len(group) != self.args.n_samples_per_prompt:
                size = len(group) if isinstance(group, list) else type(group).__name__
                raise ValueError(
                    f"a group must be a list of --n-samples-per-prompt {self.args.n_samples_per_prompt} samples, got "
                    f"{size}"
                )
        with self._lock:
            self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return super().state_dict() | {"buffer": [_store(group) for group in self.buffer]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with self._lock:
            self.buffer = [_restore(group) for group in state.get("buffer", [])]


def pop_first(
    args: Namespace, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """The default buffer filter: first in, first out. Removes what it returns from `buffer`."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


def _state_path(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def _store(member: Sample | list) -> dict | list:
    return [_store(m) for m in member] if isinstance(member, list) else member.to_dict()


def _restore(member: dict | list) -> Sample | list:
    return [_restore(m) for m in member] if isinstance(member, list) else Sample.from_dict(member)
