"""Stand-ins for parts of a run that are not under test: rollout functions, engines and trainers without a model."""

import time

from slime.ray.engine import EngineSlot
from slime.ray.train_actor import TrainerReport
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.engine_client import EngineError, EngineInfo
from slime.utils.types import Sample


def make_sample(index: int, reward: float = 1.0) -> Sample:
    """Two prompt tokens and a response of 1 to 3 tokens; groups of two."""
    length = 1 + index % 3
    sample = Sample(group_index=index // 2, index=index, prompt="p", tokens=[1, 2] + [3] * length)
    sample.response_length, sample.reward, sample.status = length, reward, Sample.Status.COMPLETED
    return sample


def generate(args, rollout_id, data_source, evaluation=False):
    """rollout_batch_size groups of two samples, rewarded in turn with 0 and 1."""
    if evaluation:
        return evaluate(args, rollout_id, data_source, evaluation)
    data_source.get_samples(args.rollout_batch_size)
    samples = [make_sample(index, float(index % 2)) for index in range(2 * args.rollout_batch_size)]
    return RolloutFnTrainOutput([samples[i : i + 2] for i in range(0, len(samples), 2)], {"rollout/extra": 7.0})


def evaluate(args, rollout_id, data_source, evaluation=True):
    """One dataset of two samples."""
    samples = [make_sample(0, 0.0), make_sample(1, 1.0)]
    return RolloutFnEvalOutput({"held_out": {"rewards": [0.0, 1.0], "truncated": [False, False], "samples": samples}})


def hang(args, rollout_id, data_source, evaluation=False):
    """A rollout whose engines never answer."""
    time.sleep(600)


class FakeEngine:
    """An engine actor without a server; dies when told to."""

    def __init__(self, args, slot: EngineSlot) -> None:
        self._slot = slot
        self._calls: list[str] = []
        self._error: str | None = None

    def pick_dist_init_addr(self) -> str:
        return f"127.0.0.1:{21000 + self._slot.rank}"

    def start(self, dist_init_addr):
        self._calls.append(f"start {dist_init_addr}")
        slot = self._slot
        return None if slot.node_rank else EngineInfo(f"http://127.0.0.1:{15000 + slot.rank}", slot.rank, 1, slot.slot)

    def check(self) -> None:
        if self._error is not None:
            raise EngineError(self._error)

    def release_memory(self) -> None:
        self._calls.append("release")

    def resume_memory(self, tags) -> None:
        self._calls.append(f"resume {','.join(tags)}")

    def stop(self) -> None:
        self._calls.append("stop")

    def die(self, error: str) -> None:
        self._error = error

    def calls(self) -> list[str]:
        return self._calls


class FakeManager:
    """A rollout manager without engines, which knows whether one is dead (args.dead)."""

    def __init__(self, args, placement) -> None:
        self._args = args

    def prepare(self) -> None:
        if error := getattr(self._args, "unprepared", None):
            raise ValueError(error)

    def start(self) -> None:
        pass

    def get_num_rollout_per_epoch(self) -> int:
        return 5

    def look_for_dead_engine(self) -> None:
        if self._args.dead:
            raise EngineError(self._args.dead)

    def generate(self, rollout_id: int) -> str:
        return f"rollout {rollout_id}"


class FakeTrainer:
    """A trainer actor without a model, data parallel; the last rank reports."""

    def __init__(self, rank, world_size, device_id, accelerator) -> None:
        self._rank, self._world_size, self._calls = rank, world_size, []

    def get_master_addr_and_port(self):
        return "127.0.0.1", 20000

    def init(self, args, role, with_ref, master_addr, master_port):
        self._calls.append(("init", role, with_ref, master_addr, master_port))
        start = getattr(args, "fake_start_ids", None) or [0] * self._world_size
        layout = {"dp_size": self._world_size, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        return TrainerReport(start[self._rank], layout)

    def connect_engines(self, engines):
        self._calls.append(("connect_engines", [engine.url for engine in engines]))

    def train(self, rollout_id, data_refs, critic_data=None):
        self._calls.append(("train", rollout_id, len(data_refs), *([critic_data] if critic_data else [])))
        return self._report({"train/loss": float(rollout_id)})

    def values(self):
        return {"values": [float(self._rank)]}

    def save_model(self, rollout_id, force_sync=False):
        self._calls.append(("save_model", rollout_id, force_sync))
        return self._report({"perf/save_model_time": 0.0})

    def update_weights(self):
        self._calls.append(("update_weights",))
        return self._report({"perf/update_weights_time": 0.0})

    def clear_memory(self):
        self._calls.append(("clear_memory",))

    def close(self):
        self._calls.append(("close",))

    def calls(self):
        return self._calls

    def _report(self, metrics):
        return metrics if self._rank == self._world_size - 1 else None
