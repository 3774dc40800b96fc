"""The rollout side of the run in one Ray actor: engines, router, data source, and the functions that make samples.

It turns a rollout id into train data in the object store. It never touches the model that is trained.
"""

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from slime.observability.logging_utils import configure_logging
from slime.ray.engine_pool import EnginePool
from slime.ray.placement import Placement
from slime.ray.utils import Box
from slime.utils.engine_client import EngineError, EngineInfo
from slime.utils.http_utils import HttpError
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from slime.utils.types import Sample

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 2.0
# A dying SGLang stops answering some seconds before its processes are gone, and its log says more than the request.
POST_MORTEM_S = 15.0
# Plug-ins that are first called in the middle of a rollout; a name that does not load should not wait that long.
PLUGINS = (
    "custom_generate_function_path",
    "custom_rm_path",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
)


@dataclass(frozen=True)
class RolloutBatch:
    """One rollout. data_refs: train data per data-parallel rank, None when nothing is trained. metrics: flat."""

    data_refs: list[Box] | None
    metrics: dict[str, float]


class RolloutManager:
    """Ray runs the calls one after the other. Heavy imports (torch) are inside: the driver imports this module too."""

    def __init__(self, args: Namespace, placement: Placement) -> None:
        """Nothing that can fail is done here: Ray would report it as the death of an actor, not as what it is."""
        configure_logging()
        self.args = args
        self._placement = placement
        self._pool: EnginePool | None = None
        self._parallel_config: dict[str, int] | None = None

    def prepare(self) -> None:
        """Brings up engine actors and router, then the data source meanwhile; `start` waits for the engines."""
        args, pool = self.args, None
        self._rollout_function = load_function(args.rollout_function_path)
        self._eval_function = load_function(args.eval_function_path)
        if not (args.debug_train_only or args.load_debug_rollout_data):
            from slime.utils.http_utils import init_http_client

            for name in PLUGINS:
                if path := getattr(args, name):
                    load_function(path)
            pool = EnginePool(args, self._placement)
            init_http_client(args)
            host = pool.router.host
            host = f"[{host}]" if ":" in host else host  # plug-ins put it into a URL
            args = args.replace(sglang_router_ip=host, sglang_router_port=pool.router.port)
        self.data_source = load_function(args.data_source_path)(args)
        self.args, self._pool = args, pool

    def get_num_rollout_per_epoch(self) -> int:
        """Rollouts in one pass over the data. Raises ValueError if the data does not fill one."""
        prompts, per_rollout = len(self.data_source), self.args.rollout_batch_size
        if prompts < per_rollout:
            raise ValueError(
                f"--num-epoch: an epoch of {prompts} prompts holds no rollout of --rollout-batch-size {per_rollout}; "
                f"lower it to {max(prompts, 1)} or give --num-rollout"
            )
        return prompts // per_rollout

    def start(self) -> None:
        """Returns once every engine generates and the router knows it; at once if `prepare` failed."""
        if self._pool is not None:
            self._pool.start()

    def engines(self) -> list[EngineInfo]:
        """The engines that receive weights, none in the modes without engines."""
        return [] if self._pool is None else self._pool.infos

    def set_train_parallel_config(self, parallel_config: dict[str, int]) -> None:
        """How to split train data: dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage."""
        self._parallel_config = parallel_config

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Samples of one rollout as train data. Raises EngineError as soon as an engine dies."""
        from slime.rollout import metrics as rollout_metrics
        from slime.rollout.debug_dump import load_debug_rollout_data, save_debug_rollout_data
        from slime.rollout.train_data import convert_samples_to_train_data, split_train_data_by_dp

        args, started = self.args, time.monotonic()
        if args.load_debug_rollout_data:
            samples, function_metrics = load_debug_rollout_data(args, rollout_id), None
        else:
            samples, function_metrics = self._call_rollout_function(rollout_id)
            save_debug_rollout_data(args, samples, rollout_id, evaluation=False)
        seconds = time.monotonic() - started
        metrics = rollout_metrics.rollout_metrics(rollout_id, args, samples, function_metrics, seconds)
        if args.debug_rollout_only:
            return RolloutBatch(None, metrics)
        if self._parallel_config is None:
            raise RuntimeError(
                "generate needs set_train_parallel_config first: it splits the data over the trainer's ranks"
            )
        data = convert_samples_to_train_data(args, samples)
        parts = split_train_data_by_dp(args, data, self._parallel_config)
        return RolloutBatch([Box(ray.put(part)) for part in parts], metrics)

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Metrics of one evaluation; empty in the modes without engines."""
        from slime.rollout import metrics as rollout_metrics
        from slime.rollout.base_types import call_rollout_fn
        from slime.rollout.debug_dump import save_debug_rollout_data

        if self._pool is None:
            return {}
        arguments = (self._eval_function, self.args, rollout_id, self.data_source)
        output = self._watched(lambda: call_rollout_fn(*arguments, evaluation=True), f"eval {rollout_id}")
        save_debug_rollout_data(self.args, output.data, rollout_id, evaluation=True)
        return rollout_metrics.eval_metrics(rollout_id, self.args, output.data, output.metrics)

    def save(self, rollout_id: int) -> None:
        """Stores where the data source stands after `rollout_id`."""
        self.data_source.save(rollout_id)

    def load(self, rollout_id: int) -> None:
        """The data source continues after `rollout_id`."""
        self.data_source.load(rollout_id)

    def offload(self) -> None:
        """Engines give their device memory back."""
        if self._pool is not None:
            self._pool.offload()

    def onload_weights(self) -> None:
        """Engines take memory for weights, so that new ones can be pushed."""
        if self._pool is not None:
            self._pool.onload(["weights"])

    def onload_kv(self) -> None:
        """Engines take the rest of their memory and can generate."""
        if self._pool is not None:
            self._pool.onload(["kv_cache", "cuda_graph"])

    def look_for_dead_engine(self) -> None:
        """Raises EngineError with the end of the log of an engine that dies within 15 s; returns if none does.

        For somebody whose request to an engine has failed and who wonders why.
        """
        deadline = time.monotonic() + POST_MORTEM_S
        while self._pool is not None and time.monotonic() < deadline:
            self._pool.check()
            time.sleep(0.5)

    def dispose(self) -> None:
        """Stops engines and router."""
        if self._pool is not None:
            self._pool.stop()
            self._pool = None

    def _call_rollout_function(self, rollout_id: int) -> tuple[list["Sample"], dict[str, Any] | None]:
        from slime.rollout.base_types import call_rollout_fn, flatten_samples

        arguments = (self._rollout_function, self.args, rollout_id, self.data_source)
        output = self._watched(lambda: call_rollout_fn(*arguments, evaluation=False), f"rollout {rollout_id}")
        samples = flatten_samples(output.samples)
        if not samples:
            raise ValueError(f"rollout {rollout_id}: {self.args.rollout_function_path} returned no samples")
        return samples, output.metrics

    def _watched[T](self, work: Callable[[], T], doing: str) -> T:
        """Result of `work`, run on a thread of its own while this one looks after the engines every 2 s.

        Should an engine die, its EngineError is raised at once; the thread is left to its fate, for the run ends.
        """
        if self._pool is None:
            return work()
        future: Future[T] = Future()
        threading.Thread(target=_complete, args=(future, work), name=doing, daemon=True).start()
        while not wait([future], timeout=WATCH_INTERVAL_S).done:
            self._pool.check()
        try:
            return future.result()
        except (HttpError, EngineError, OSError) as error:
            try:
                self.look_for_dead_engine()
            except EngineError as dead:
                raise dead from error
            raise


def _complete[T](future: "Future[T]", work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # whatever it is, the waiting thread raises it
        future.set_exception(error)
