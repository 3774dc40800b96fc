"""What scripts/lib does in a launch: which commands run where, and that everything ends, and nothing else does."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.fake_cluster import ROOT, FakeCluster, env_vars_of

SCRIPT = "launcher.sh"
LAUNCHER = """
set -euo pipefail
source {lib}/launch.sh
RUNTIME_ENV=({env})
slime_launch train.py "$@"
"""
TOKENS = ("--a", "two words", "$HOME `id` $(id)", '{"k": "it\'s"}', "[0]*3+[1]*75", "", r"layers\.(0|1)\.", "--b")


@pytest.fixture
def launcher(cluster: FakeCluster) -> Path:
    """A launcher with nothing but its end; its environment holds characters that shells like to interpret."""
    path = cluster.directory / SCRIPT
    path.write_text(LAUNCHER.format(lib=ROOT / "scripts/lib", env="""QUOTED='a "b" $c \\d' EMPTY= NCCL_DEBUG=INFO"""))
    return path


def test_a_run_over_a_host_file(cluster, launcher):
    """One head, each other host once, the job with exactly the tokens of the launcher, then everything is ended."""
    hosts = cluster.directory / "host file"
    hosts.write_text(
        "# the cluster\nnode-0 slots=8\n\nnode-1 slots=8  # rack 2\nroot@10.0.0.3\r\nnode-1\nlocalhost\n10.0.0.9:8"
    )
    cluster.set("job-ends", "succeeded")
    result = cluster.run(
        launcher, *TOKENS, MASTER_ADDR="10.0.0.1", HOSTFILE=str(hosts), NUM_GPUS="4", SLIME_SSH_OPTIONS="-p 2222"
    )
    assert result.returncode == 0, result.stderr

    head, *workers = cluster.calls("ray", "start")
    assert head["argv"][:9] == "--head --node-ip-address 10.0.0.1 --port 6379 --include-dashboard true".split() + [
        "--dashboard-host",
        "127.0.0.1",
    ]
    assert head["argv"][-5:] == ["8265", "--disable-usage-stats", "--block", "--num-gpus", "4"]
    joined = {call["env"]["FAKE_HOST"]: call["argv"] for call in workers}
    common = "--address 10.0.0.1:6379 --disable-usage-stats --block --num-gpus 4".split()
    assert joined == {
        "node-1": common,
        "root@10.0.0.3": [*common, "--node-ip-address", "10.0.0.3"],
        "10.0.0.9": [*common, "--node-ip-address", "10.0.0.9"],
    }
    for call in cluster.calls("ssh"):
        assert call["argv"][:6] == ["-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-p", "2222"]
        assert call["argv"][7:] == ["bash", "-s"]

    (submission,) = cluster.calls("ray", "job", "submit")
    entry = submission["argv"].index("--")
    assert submission["argv"][entry + 1 :] == [str(cluster.bin / "python3"), str(ROOT / "train.py"), *TOKENS]
    assert submission["argv"][:2] == ["--address", "http://127.0.0.1:8265"]
    no_proxy = "localhost,127.0.0.1,0.0.0.0,10.0.0.1,node-1,10.0.0.3,10.0.0.9"
    assert env_vars_of(submission) == {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_DEBUG": "INFO",
        "QUOTED": 'a "b" $c \\d',
        "MASTER_ADDR": "10.0.0.1",
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
    }
    assert all(call["env"]["no_proxy"] == no_proxy for call in [head, *workers, submission])
    assert all(call["env"]["http_proxy"] is None for call in workers)
    assert sorted(call["argv"][0] for call in cluster.calls("ray", "ended")) == sorted(["head", *joined])
    assert not cluster.alive()
    assert {path.suffix for path in cluster.run_dir.iterdir()} == {".log"}
    assert len([*cluster.run_dir.glob("worker-*.log")]) == 3


def test_head_and_workers_share_a_token_of_the_run(cluster, launcher):
    """Ray runs what it is told by whoever reaches its ports. `ray start` demands a token as soon as one lies in the
    home directory, while `ray job submit` does not send it then: the launcher must settle it for all of them."""
    (cluster.directory / "hosts").write_text("node-1\n")
    cluster.set("job-ends", "succeeded")
    assert cluster.run(launcher, MASTER_ADDR="10.0.0.1", HOSTFILE="hosts").returncode == 0
    (submission,) = cluster.calls("ray", "job", "submit")
    head, worker = cluster.calls("ray", "start")
    assert head["env"]["RAY_AUTH_TOKEN_PATH"] == submission["env"]["RAY_AUTH_TOKEN_PATH"]
    assert {call["env"]["RAY_AUTH_MODE"] for call in (head, worker, submission)} == {"token"}
    assert len(bytes.fromhex(worker["env"]["RAY_AUTH_TOKEN"])) == 32


def test_the_users_authentication_stays(cluster, launcher):
    (cluster.directory / "hosts").write_text("node-1\n")
    cluster.set("job-ends", "succeeded")
    cluster.run(launcher, MASTER_ADDR="10.0.0.1", HOSTFILE="hosts", RAY_AUTH_MODE="disabled")
    calls = [*cluster.calls("ray", "start"), *cluster.calls("ray", "job", "submit")]
    assert {call["env"]["RAY_AUTH_MODE"] for call in calls} == {"disabled"}
    assert {call["env"]["RAY_AUTH_TOKEN"] for call in calls} == {None}


def test_one_node_needs_no_address(cluster, launcher):
    cluster.set("job-ends", "succeeded")
    result = cluster.run(launcher)
    (head,) = cluster.calls("ray", "start")
    assert result.returncode == 0 and head["argv"][:3] == ["--head", "--node-ip-address", "127.0.0.1"]
    assert "MASTER_ADDR" not in env_vars_of(*cluster.calls("ray", "job", "submit"))
    assert not cluster.calls("ssh") and "HOSTFILE" not in result.stderr


def test_rays_note_of_the_cluster_is_taken_back(cluster, launcher):
    """Later programs of the machine would try to join a cluster that has ended; a newer cluster's note stays."""
    process = cluster.start(launcher)
    cluster.wait_for_call("ray", "job", "submit")
    assert cluster.note.exists()
    process.terminate()
    process.communicate(timeout=30)
    assert not cluster.note.exists()
    process = cluster.start(launcher)
    while len(cluster.calls("ray", "job", "submit")) < 2:
        time.sleep(0.05)
    cluster.note.write_text("10.0.0.1:7000")
    process.terminate()
    process.communicate(timeout=30)
    assert cluster.note.read_text() == "10.0.0.1:7000"


def test_a_failed_job_is_a_failed_launch(cluster, launcher):
    cluster.set("job-ends", "failed")
    assert cluster.run(launcher).returncode == 1
    assert not cluster.alive()


def test_a_job_that_somebody_stops_is_no_success(cluster, launcher):
    """`ray job submit` and `ray job logs` end with 0 when their job was stopped."""
    cluster.set("job-ends", "stopped")
    result = cluster.run(launcher)
    assert result.returncode == 1 and "been stopped by somebody" in result.stderr


def test_a_lost_log_does_not_end_the_run(cluster, launcher):
    """`ray job logs` gives up when its connection breaks, and a busy head may not answer for a while; to take that
    for the end would kill a healthy training."""
    cluster.set("log-is-lost", "yes")
    cluster.set("silent-answers", "3")
    cluster.set("job-ends", "succeeded")
    result = cluster.run(launcher)
    assert result.returncode == 0, result.stderr
    assert len(cluster.calls("ray", "job", "logs")) == 4  # lost, twice more without an answer, the end
    assert all(call["argv"][2:3] == ["--follow"] for call in cluster.calls("ray", "job", "logs"))
    assert "output of the job" in result.stdout and len(cluster.calls("ray", "job", "submit")) == 1


def test_a_head_that_dies_ends_the_run(cluster, launcher):
    process = cluster.start(launcher)
    cluster.wait_for_call("ray", "job", "logs")
    (head,) = cluster.alive()
    cluster.set("silent-answers", "99")
    cluster.set("job-state", "")
    os.kill(head, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "Ray on this node has ended" in err


def test_a_head_that_is_not_ready_for_jobs_is_asked_again(cluster, launcher):
    """Ray says that it runs before the agent that runs jobs has registered; on a busy node that takes seconds."""
    cluster.set("submission-fails", "Error 500: No available agent to submit job, please try again later.")
    cluster.set("job-ends", "succeeded")
    assert cluster.run(launcher).returncode == 0
    assert len(cluster.calls("ray", "job", "submit")) == 2


def test_a_refused_job_is_explained(cluster, launcher):
    cluster.set("submission-fails", "AuthenticationError: Missing token")
    result = cluster.run(launcher)
    assert result.returncode == 1 and "AuthenticationError: Missing token" in result.stderr
    assert len(cluster.calls("ray", "job", "submit")) == 1 and not cluster.alive()


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_job_before_its_cluster(cluster, launcher, number, code):
    """Ray's processes must outlive the driver, which ends its engines in order; a terminal signals the whole group."""
    (cluster.directory / "hosts").write_text("node-1\n")
    process = cluster.start(launcher, MASTER_ADDR="10.0.0.1", HOSTFILE="hosts")
    cluster.wait_for_call("ray", "job", "submit")
    os.killpg(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == code
    calls = [" ".join(call["argv"][:3]) for call in cluster.calls("ray")]
    stopped = next(i for i, call in enumerate(calls) if call.startswith("job stop"))
    ended = [i for i, call in enumerate(calls) if call.startswith("ended")]
    assert len(ended) == 2 and min(ended) > stopped
    assert not cluster.alive()


def test_a_signal_while_the_workers_start(cluster, launcher):
    (cluster.directory / "hosts").write_text("node-1\nnode-2\n")
    cluster.set("ray-hangs-on", "node-2")
    process = cluster.start(launcher, MASTER_ADDR="10.0.0.1", HOSTFILE="hosts")
    while len(cluster.alive()) < 3:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143 and not cluster.alive() and not cluster.calls("ray", "job")


def test_a_job_that_is_being_submitted_does_not_start_after_all(cluster, launcher):
    """Ctrl-C a moment after the start, on a cluster that stays: the submission must not go on in the background."""
    cluster.set("submission-takes", "3")
    process = cluster.start(launcher, RAY_ADDRESS="10.0.0.7:6379")
    cluster.wait_for_call("ray", "job", "submit")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    time.sleep(3)
    assert (cluster.bin / "job-state").read_text() != "running"


def test_nothing_but_the_own_processes_is_ended(cluster, launcher):
    """`ray stop` or `pkill python` would take this bystander along, another cluster of the same user."""
    bystander = subprocess.Popen(
        [str(cluster.bin / "ray"), "start", "--head", "--block"], env=cluster.environment(), stdout=subprocess.PIPE
    )
    cluster.processes.append(bystander)
    while not cluster.note.exists():
        time.sleep(0.05)
    cluster.set("job-ends", "succeeded")
    assert cluster.run(launcher).returncode == 0
    assert cluster.alive() == [bystander.pid]
    assert not any("stop" in call["argv"] for call in cluster.calls("ray"))


def test_a_reused_process_id_is_left_alone(cluster, tmp_path):
    """The pid file of an old run may name a process that now belongs to somebody else: its start time tells."""
    other = subprocess.Popen(["sleep", "60"])
    cluster.processes.append(other)
    started = cluster.call("node_started_at", str(other.pid)).strip()
    (tmp_path / "head.pid").write_text(f"{other.pid} {int(started) - 1}\n")
    cluster.call("node_stop", str(tmp_path), "head")
    assert other.poll() is None and not (tmp_path / "head.pid").exists()
    (tmp_path / "head.pid").write_text(f"{other.pid} {started}\n")
    ending = subprocess.Popen([str(Path("/bin/bash")), "-c", f'source "{ROOT}/scripts/lib/node.sh"; node_stop . head'],
                              cwd=tmp_path)  # fmt: skip
    assert other.wait(timeout=10) == -signal.SIGTERM and ending.wait(timeout=10) == 0


def test_a_head_that_does_not_start_is_reported(cluster, launcher):
    cluster.set("ray-fails-on", "head")
    result = cluster.run(launcher, RAY_PORT="6400")
    assert result.returncode == 1
    assert "cannot start: port 6379 is taken" in result.stderr  # the end of Ray's own log
    assert "SLIME_RAY_STARTED=1" in result.stderr and "--port 6400" in result.stderr
    assert not cluster.calls("ray", "job")


def test_workers_that_do_not_start_are_all_named(cluster, launcher):
    """Finding one broken node of 32 at each attempt takes a day."""
    (cluster.directory / "hosts").write_text("node-1\nnode-2\n10.0.0.9\n")
    cluster.set("ray-fails-on", "node-1")
    cluster.set("ssh-fails-on", "10.0.0.9")
    result = cluster.run(launcher, MASTER_ADDR="10.0.0.1", HOSTFILE="hosts")
    assert result.returncode == 1
    assert "did not start on node-1" in result.stderr and "did not start on 10.0.0.9" in result.stderr
    assert "did not start on node-2" not in result.stderr
    assert "cannot start: port 6379 is taken" in result.stderr
    assert not cluster.calls("ray", "job") and not cluster.alive()


def test_a_node_that_does_not_get_ready_is_given_up(cluster, launcher):
    cluster.set("ray-hangs-on", "head")
    result = cluster.run(launcher, SLIME_RAY_START_TIMEOUT="1")
    assert result.returncode == 1 and "is not ready in time" in result.stderr
    assert not cluster.alive()


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "SLIME_RAY_STARTED"])
def test_a_running_cluster_is_used_and_left_running(cluster, launcher, name):
    (cluster.directory / "hosts").write_text("node-1\n")
    address = {"RAY_ADDRESS": "10.0.0.7:6379", "SLIME_RAY_STARTED": "1"}[name]
    process = cluster.start(launcher, "--x", MASTER_ADDR="10.0.0.1", HOSTFILE="hosts", **{name: address})
    cluster.wait_for_call("ray", "job", "submit")
    process.terminate()
    process.communicate(timeout=30)
    expected = address if name == "RAY_ADDRESS" else "http://127.0.0.1:8265"
    for command in ("submit", "stop"):
        (call,) = cluster.calls("ray", "job", command)
        assert call["argv"][:2] == ["--address", expected]
    assert process.returncode == 143
    assert not cluster.calls("ray", "start") and not cluster.calls("ssh")


def test_what_a_killed_launcher_left_can_be_stopped(cluster, launcher):
    (cluster.directory / "hosts").write_text("node-1\n")
    process = cluster.start(launcher, MASTER_ADDR="10.0.0.1", HOSTFILE="hosts")
    cluster.wait_for_call("ray", "job", "submit")
    process.kill()
    process.wait()
    assert len(cluster.alive()) == 2
    again = cluster.run(launcher)
    assert again.returncode == 1 and "scripts/lib/stop.sh" in again.stderr and len(cluster.alive()) == 2
    result = cluster.run("scripts/lib/stop.sh", str(cluster.run_dir))
    assert result.returncode == 0, result.stderr
    assert len(cluster.calls("ray", "job", "stop")) == 1
    assert not cluster.alive()


def test_an_unreadable_host_file_starts_nothing(cluster, launcher):
    result = cluster.run(launcher, MASTER_ADDR="10.0.0.1", HOSTFILE="/nonexistent/hosts")
    assert result.returncode == 1 and "HOSTFILE=/nonexistent/hosts cannot be read" in result.stderr
    assert not cluster.calls("ray")


def test_many_nodes_without_a_host_file_are_explained(cluster, launcher):
    cluster.set("job-ends", "succeeded")
    result = cluster.run(launcher, MASTER_ADDR="10.0.0.1", SLIME_RAY_STARTED="0")
    assert "run there: ray start --address 10.0.0.1:6379" in result.stderr


def test_a_checkout_in_a_directory_with_spaces(cluster, launcher):
    """Everything is quoted: neither the checkout nor the run's directory may fall apart at a space."""
    checkout = cluster.directory / "my checkout"
    shutil.copytree(ROOT / "scripts/lib", checkout / "scripts/lib")
    text = launcher.read_text().replace(str(ROOT / "scripts/lib"), '"$(dirname -- "$0")/scripts/lib"')
    (checkout / SCRIPT).write_text(text)
    cluster.set("job-ends", "succeeded")
    result = cluster.run(checkout / SCRIPT, "--x")
    assert result.returncode == 0, result.stderr
    (submission,) = cluster.calls("ray", "job", "submit")
    assert submission["argv"][-2:] == [str(checkout / "train.py"), "--x"]
    assert env_vars_of(submission)["PYTHONPATH"] == str(checkout)


@pytest.mark.parametrize("value, dry", [("1", True), ("true", True), ("yes", True), ("0", False), ("", False)])
def test_dry_run_starts_nothing(cluster, launcher, value, dry):
    """Whatever is not a clear no is a dry run: the alternative is to start on 256 GPUs what was to be looked at."""
    cluster.set("job-ends", "succeeded")
    result = cluster.run(launcher, *TOKENS, DRY_RUN=value)
    assert result.returncode == 0
    if dry:
        assert json.loads(result.stdout) == [str(ROOT / "train.py"), *TOKENS, "--dry-run"]
    assert bool(cluster.calls("ray")) != dry


def test_missing_programs_are_named(cluster, launcher):
    result = cluster.run(launcher, SLIME_PYTHON="/nonexistent/python")
    assert result.returncode == 1 and "/nonexistent/python is not there" in result.stderr
    (cluster.bin / "ray").unlink()
    result = cluster.run(launcher)
    assert result.returncode == 1 and "no `ray` beside" in result.stderr


@pytest.mark.parametrize(
    "topology, expected",
    [
        ("        GPU0    GPU1\nGPU0     X      NV18\nGPU1    NV18     X", "1"),
        ("        GPU0    GPU1\nGPU0     X      SYS\nGPU1    SYS     X\n\n  NV#  = a bonded set of # NVLinks", "0"),
        ("", "0"),
    ],
)
def test_nvlink_is_detected(cluster, topology, expected):
    """The legend of `nvidia-smi topo -m` mentions NV# on machines without NVLink, too."""
    cluster.set("topology", topology)
    assert cluster.call("slime_has_nvlink").strip() == expected
    (cluster.bin / "nvidia-smi").unlink()
    assert cluster.call("slime_has_nvlink").strip() == "0"


def test_no_proxy_keeps_what_was_there(cluster):
    before = {"no_proxy": "*.corp, 10.1.0.0/16,localhost", "MASTER_ADDR": "10.0.0.1"}
    listed = cluster.call("slime_no_proxy", "root@node-1", "10.0.0.1", **before).strip()
    assert listed == "localhost,127.0.0.1,0.0.0.0,10.0.0.1,node-1,*.corp,10.1.0.0/16"


values = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.from_regex(r"\A[A-Z_][A-Z0-9_]{0,8}\Z"), values, max_size=6))
def test_every_environment_survives_as_json(cluster, variables):
    """A launcher that wrote its JSON by hand between single quotes handed on the text ${MASTER_ADDR} as it stood."""
    words = [f"{name}={value}" for name, value in variables.items()]
    written = json.loads(cluster.call("slime_runtime_env_json", "A=overruled", *words, LC_ALL="C.UTF-8"))
    expected = {"A": "overruled"} | variables
    assert written == {"env_vars": {name: value for name, value in expected.items() if value}}


def test_an_environment_that_is_no_pair_is_refused(cluster):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        cluster.call("slime_runtime_env_json", "2BAD=1")
    assert "'2BAD=1' is not NAME=value" in caught.value.stderr


def test_ipv6_and_quotes(cluster):
    assert cluster.call("slime_head_address", MASTER_ADDR="fd00::1").strip() == "[fd00::1]:6379"
    text = 'it\'s "$HOME"\\'
    assert subprocess.check_output(["sh", "-c", f"printf %s {cluster.call('slime_quote', text)}"], text=True) == text
    assert os.path.isabs(cluster.call("slime_python").strip())
