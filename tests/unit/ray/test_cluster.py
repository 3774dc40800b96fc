"""How many slots a run needs, and what the user reads when Ray has fewer."""

import signal

import pytest

from slime.ray import cluster
from tests.helpers.ray_args import make_args


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, (8 + 6, 8)),
        ({"colocate": True}, (8, 0)),
        ({"colocate": True, "rollout_num_gpus": 11}, (11, 0)),
        ({"debug_train_only": True}, (8, 0)),
        ({"load_debug_rollout_data": "dump_{rollout_id}.pt"}, (8, 0)),
        ({"debug_rollout_only": True}, (6, 0)),
        ({"rollout_num_gpus": 0}, (8, 8)),
        ({"rollout_num_gpus": None, "debug_train_only": True}, (8, 0)),
    ],
)
def test_slots(changes, expected):
    args = make_args(actor_num_nodes=2, actor_num_gpus_per_node=4, rollout_num_gpus=6).replace(**changes)
    assert cluster.slots(args) == expected


def pretend_ray_has(monkeypatch, **resources):
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: resources)


def test_too_few_gpus_are_an_error_with_the_arithmetic(monkeypatch):
    pretend_ray_has(monkeypatch, GPU=8.0, CPU=64.0)
    args = make_args(accelerator="cuda", actor_num_gpus_per_node=8, rollout_num_gpus=8)
    with pytest.raises(ValueError, match=r"need 16 GPUs, Ray has 8: actor 8 .* \+ rollout 8 .*--colocate"):
        cluster._wait_for_resources(args)


def test_advice_to_colocate_only_where_it_helps(monkeypatch):
    pretend_ray_has(monkeypatch, GPU=4.0, CPU=64.0)
    args = make_args(accelerator="cuda", actor_num_gpus_per_node=8, rollout_num_gpus=8)
    with pytest.raises(ValueError, match="need 16 GPUs, Ray has 4") as caught:
        cluster._wait_for_resources(args)
    assert "--colocate" not in str(caught.value)


def test_cpu_slots_count_the_manager(monkeypatch):
    pretend_ray_has(monkeypatch, CPU=4.0)
    with pytest.raises(ValueError, match="need 5 CPUs, Ray has 4: .* 1 for the rollout manager"):
        cluster._wait_for_resources(make_args())
    pretend_ray_has(monkeypatch, CPU=5.0)
    cluster._wait_for_resources(make_args())


def test_a_given_cluster_may_still_be_growing(monkeypatch):
    """Nodes that join within --ray-startup-timeout count."""
    answers = iter([{"CPU": 1.0}, {"CPU": 3.0}, {"CPU": 9.0}])
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: next(answers))
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: None)
    cluster._wait_for_resources(make_args(ray_address="10.0.0.1:6379"))


def test_ray_does_not_take_the_sigterm_handler(cluster):
    """`cluster` has connected in this process; pytest has none, so the default is still there."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_no_cluster_at_the_address_names_the_flag():
    with pytest.raises(ConnectionError, match="--ray-address 127.0.0.1:1: no Ray cluster answers"):
        cluster._join("127.0.0.1:1", timeout=0.5)


def test_a_private_cluster_is_not_sought_elsewhere(monkeypatch):
    """A left-over /tmp/ray/ray_current_cluster made ray.init join a dead cluster and refuse the number of CPUs."""
    asked = {}
    monkeypatch.setattr(cluster.ray, "init", lambda **how: asked.update(how))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    cluster._start_local(make_args(actor_num_gpus_per_node=4, rollout_num_gpus=3))
    assert asked["address"] == "local" and asked["num_cpus"] >= 8
