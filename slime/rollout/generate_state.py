"""What all generation of one process shares: tokenizer, request slots, sampling parameters, and whether a rollout is
being aborted.
"""

import asyncio
import hashlib
import json
import logging
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slime.rollout.engine_status import describe_engines
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 30.0


@dataclass
class Draw:
    """A group taken from the data source. group: being generated. untouched: a copy as it was drawn. retries: aborts
    by an engine.
    """

    group: list
    untouched: list
    retries: int = 0


class GenerateState(metaclass=SingletonMeta):
    """One per process, made from the first `args` it is called with.

    semaphore: one slot per request the engines should hold at once (--sglang-server-concurrency per engine).
    sampling_params: of training requests; copy before changing. aborted: set while a rollout is cut short, long-
    running generate functions should return soon. pendings: running group tasks. remaining_batch_size: groups kept
    plus groups running. in_flight: requests sent by the built-in generate and not answered yet.
    """

    def __init__(self, args: Namespace):
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.vocab_size = _vocab_size(args.hf_checkpoint, self.tokenizer)
        self.num_slots = args.sglang_server_concurrency * max(1, get_rollout_num_engines(args))
        self.semaphore = asyncio.Semaphore(self.num_slots)
        self._slot_queue = asyncio.Lock()
        self.sampling_params = training_sampling_params(args)
        self.in_flight = 0
        self.reset(rollout_id=None)

    @cached_property
    def processor(self) -> Any | None:
        """The checkpoint's multimodal processor, None for a text-only model."""
        return load_processor(self.args.hf_checkpoint)

    def reset(self, rollout_id: int | None) -> None:
        """Begin a rollout or an evaluation."""
        self.rollout_id = rollout_id
        self.aborted = False
        self.pendings: dict[asyncio.Task, Draw] = {}
        self.remaining_batch_size = 0
        self.last_finish = time.monotonic()

    @asynccontextmanager
    async def hold(self, num_requests: int) -> AsyncIterator[None]:
        """Hold slots for several requests at once; more than there are means all of them. One caller collects at a
        time, so two groups cannot block each other with half of what they need.
        """
        wanted, held = min(num_requests, self.num_slots), 0
        try:
            async with self._slot_queue:
                while held < wanted:
                    await self.semaphore.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                self.semaphore.release()

    def params_for(self, sample: Sample, sampling_params: dict[str, Any]) -> dict[str, Any]:
        """The sample's own copy of the parameters; with deterministic inference it carries the sample's seed.

        Raises ValueError for min_p there: a rollout repeats exactly only where it samples from the whole distribution.
        """
        params = dict(sampling_params)
        if self.args.sglang_enable_deterministic_inference:
            if params.get("min_p"):
                raise ValueError(
                    f"sample index={sample.index}: sampling parameter min_p {params['min_p']} is not supported with "
                    "--sglang-enable-deterministic-inference; leave one of the two out"
                )
            params["sampling_seed"] = sampling_seed(self.args.rollout_seed, sample)
        return params

    def check_vocabulary(self, sample: Sample, token_ids: list[int]) -> None:
        """ValueError for an id outside the model's vocabulary: an engine that is given one dies."""
        if token_ids and 0 <= min(token_ids) and max(token_ids) < self.vocab_size:
            return
        where = f"sample index={sample.index} group_index={sample.group_index}"
        if not token_ids:
            raise ValueError(f"{where}: the prompt has no tokens: {sample.prompt!r:.200}")
        position = next(i for i, token in enumerate(token_ids) if not 0 <= token < self.vocab_size)
        raise ValueError(
            f"{where}: token {token_ids[position]} at position {position} of {len(token_ids)} is outside the "
            f"vocabulary of --hf-checkpoint {self.args.hf_checkpoint}: legal ids are 0 to {self.vocab_size - 1}"
        )

    async def wait_some(self, tasks: Iterable[asyncio.Task], what: str) -> set[asyncio.Task]:
        """The tasks that are done, at least one; logs progress every 30 s.

        Raises TimeoutError naming the engines when no sample has finished for --rollout-stall-timeout seconds.
        """
        tasks, limit_s = list(tasks), self.args.rollout_stall_timeout
        while True:
            quiet_s = time.monotonic() - self.last_finish
            if quiet_s >= limit_s:
                raise TimeoutError(
                    f"{what}: no sample finished for {quiet_s:.0f} s (--rollout-stall-timeout {limit_s:g}) while "
                    f"{len(tasks)} groups are running with {self.in_flight} requests in flight; waiting for "
                    f"{await describe_engines(self.args)}"
                )
            timeout = min(PROGRESS_INTERVAL_S, limit_s - quiet_s)
            done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return done
            logger.info("%s: %d groups running, %d requests in flight", what, len(tasks), self.in_flight)


def training_sampling_params(args: Namespace) -> dict[str, Any]:
    """Sampling parameters of a training request, in SGLang's names."""
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if args.rollout_top_p != 1.0:
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


def sampling_seed(rollout_seed: int, sample: Sample) -> int:
    """31-bit seed that depends on the run's seed and the sample alone, so that it does not matter which request comes
    first. Samples of one group that follow each other have seeds that follow each other, as entries of one request do.
    """
    digest = hashlib.blake2b(f"{rollout_seed}:{sample.group_index}".encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little") + (sample.index or 0)) & 0x7FFFFFFF


def _vocab_size(hf_checkpoint: str, tokenizer: Any) -> int:
    """Rows of the model's embedding according to config.json; where that is silent, the tokenizer's size."""
    path = Path(hf_checkpoint) / "config.json"
    if path.is_file():
        config = json.loads(path.read_text())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        if size:
            return size
    return len(tokenizer)
