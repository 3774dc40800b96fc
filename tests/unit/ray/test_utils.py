"""Waits that name whom they wait for, device numbering, worker environments."""

import time

import pytest
import ray

from slime.ray.utils import add_default_ray_env_vars, local_device_index, merge_metrics, wait_for


@ray.remote(num_cpus=0)
def work(seconds: float, error: Exception | None = None) -> float:
    time.sleep(seconds)
    if error is not None:
        raise error
    return seconds


def test_wait_returns_values_by_name_in_the_given_order(cluster):
    refs = {"slow": work.remote(0.3), "quick": work.remote(0.0)}
    assert list(wait_for(refs, "test").items()) == [("slow", 0.3), ("quick", 0.0)]


def test_first_failure_is_raised_without_waiting_for_the_others(cluster):
    ray.get(work.remote(0.0))  # a worker process is up
    started = time.monotonic()
    refs = {"rank 0": work.remote(60.0), "rank 1": work.remote(0.1, ValueError("bad row"))}
    with pytest.raises(ValueError, match="bad row") as caught:
        wait_for(refs, "train rollout 7")
    assert time.monotonic() - started < 20
    assert caught.value.__notes__ == ["train rollout 7: rank 1 failed"]
    ray.cancel(refs["rank 0"], force=True)


def test_time_out_names_who_is_missing(cluster):
    refs = {"rank 0": work.remote(0.0), "rank 1": work.remote(60.0)}
    ray.get(refs["rank 0"])
    with pytest.raises(TimeoutError, match="save after rollout 3: no answer from rank 1 after 0.5 s"):
        wait_for(refs, "save after rollout 3", timeout=0.5)
    ray.cancel(refs["rank 1"], force=True)


def test_a_long_wait_is_logged(cluster, caplog):
    wait_for({"rank 0": work.remote(1.0)}, "generate", remind_every=0.3)
    assert "generate: still waiting for rank 0" in caplog.text


@pytest.mark.parametrize(
    "device, visible, expected",
    [(3, None, 3), (5, "4,5,6", 1), ("5", "4, 5,6", 1), ("GPU-b", "GPU-a,GPU-b", 1), (10, "1,10", 1)],
)
def test_local_device_index(device, visible, expected):
    assert local_device_index(device, visible) == expected


@pytest.mark.parametrize("device, visible", [(1, "10,2"), ("GPU-a", None), (0, "")])
def test_hidden_or_unknown_device_is_an_error(device, visible):
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        local_device_index(device, visible)


def test_worker_environment():
    cuda = add_default_ray_env_vars("cuda", {"A": "1"})
    assert cuda["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1" and cuda["A"] == "1"
    assert "OMP_NUM_THREADS" not in cuda
    assert add_default_ray_env_vars("cpu") == {"OMP_NUM_THREADS": "1"}
    assert add_default_ray_env_vars("cpu", {"OMP_NUM_THREADS": "4"}) == {"OMP_NUM_THREADS": "4"}


def test_merge_metrics_skips_ranks_without():
    assert merge_metrics([None, {"a": 1.0}, {}, {"b": 2.0}]) == {"a": 1.0, "b": 2.0}
